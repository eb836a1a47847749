"""Code that all chapters share; README.md is a map."""
