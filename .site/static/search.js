// A result of the search leads to the first place that has the words, not to the top of its page.
function showFirst() {
  const found = [...document.querySelectorAll("article .highlighted")];
  if (!location.hash) found.find((word) => word.checkVisibility())?.scrollIntoView({ block: "center" });
}
addEventListener("load", () => setTimeout(showFirst, 100)); // after Sphinx has marked the words
