"""What chapters 4 and 5 and their options need and how fast they are, next to DDP, on GPUs.

python tests/benchmarks/fsdp.py options --output tests/benchmarks/results/fsdp_options.json

    options     a model of the shape of Llama-3.1-8B at 8192 positions, each option, and pairs
    precision   the same model, in every precision of chapter 5
    gpt2        GPT-2 124M with DDP and with FSDP
    largest     the most blocks of Llama-3.1-8B with which a step succeeds, found by trying
    checkpoint  what saving takes from the training of the 8B model
    gpt2-checkpoint  and from that of GPT-2 124M in bfloat16, on one GPU
    length, length-llama  1k to 32k tokens in a sequence, as many tokens in a step, on one GPU
    size        124M to 1.5B parameters, on one GPU

Every configuration is a run of a chapter's own script, one process for each GPU, forked from one
that has imported PyTorch already. Evaluation, sample and, but for two sets, checkpoints are
left out: they are not what is measured. With --tiny all is small, to try the file without GPUs.
"""

import argparse
import fnmatch
import gc
import json
import logging
import multiprocessing
import os
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import file_name, visible_gpus, write_result
from torch.distributed import TCPStore

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))
# Not runner, yet: it imports transformers, that imports torchao, and that asks CUDA for its GPUs.
# From then on CUDA_VISIBLE_DEVICES of a rank would come too late.

DDP, FSDP, MIXED = "03-multi-node", "04-fsdp", "05-mixed-precision"
OUT_OF_MEMORY = 3
USABLE = 0.96  # of the memory of a GPU: CUDA and NCCL hold some, and no allocator fills it
USABLE_HOST = 0.85  # the system ends what asks for more than there is, and not always that process
PRESETS = REPOSITORY / "common/presets"
SHAPE, TINY = (PRESETS / name / "config.json" for name in ("llama-3.1-8b", "llama-tiny"))
NEVER = str(10**9)

# Imports of these touch no GPU, or no child could use one.
PRELOAD = ["torch.distributed.checkpoint", "transformers.models.llama", "datasets"]

# Each: label, arguments, number of runs. All of them recompute and compile unless they say so.
NOTHING, SELECTIVE, FULL = (
    f"--activation-checkpointing {what}" for what in ("none", "selective", "full")
)
OPTIONS = [
    ("selective", f"--compile {SELECTIVE}", 3),
    ("full", f"--compile {FULL}", 3),
    ("no checkpointing", "--compile", 1),
    ("full, not compiled", FULL, 1),
    ("full, no reshard", f"--compile {FULL} --no-reshard-after-forward", 1),
    ("full, HSDP on 2 halves", f"--compile {FULL} --hsdp", 1),
    ("full, 2 micro-batches", f"--compile {FULL} --global-batch-size 2x", 1),
    (
        "full, 2 micro-batches, all reduced",
        f"--compile {FULL} --global-batch-size 2x --reduce-every-backward",
        1,
    ),
    ("full, offload", f"--compile {FULL} --cpu-offload", 1),
    ("full, bfloat16 weights", f"--compile {FULL} --param-dtype bfloat16", 1),
]
# Each: label, arguments, steps, those left out, number of runs. All of them recompute selectively
# unless they say so.
PRECISION = [
    ("bf16, compiled", "--precision bf16 --compile", 10, 4, 3),
    ("fp8, compiled", "--precision fp8 --compile", 10, 4, 3),
    ("bf16, compiled, 2 sequences", "--precision bf16 --compile -b 2x", 10, 4, 3),
    ("fp8, compiled, 2 sequences", "--precision fp8 --compile -b 2x", 10, 4, 3),
    ("bf16, compiled, no checkpointing", f"--precision bf16 --compile {NOTHING}", 10, 4, 3),
    ("fp8, compiled, no checkpointing", f"--precision fp8 --compile {NOTHING}", 10, 4, 3),
    ("bf16", "--precision bf16", 8, 3, 3),
    ("tf32", "--precision tf32", 5, 2, 3),
    ("fp32", "--precision fp32", 3, 1, 1),
    ("fp16, compiled", "--precision fp16 --compile", 10, 4, 1),
    ("tf32, compiled", "--precision tf32 --compile", 5, 2, 1),
    ("bf16, compiled, bf16 sums", "--precision bf16 --compile --reduce-dtype bfloat16", 10, 4, 1),
]
# Layers, width, heads of GPT-2's four sizes.
SIZES = {
    "124M": (12, 768, 12),
    "355M": (24, 1024, 16),
    "774M": (36, 1280, 20),
    "1.5B": (48, 1600, 25),
}
OFFLOAD = f"{FULL} --cpu-offload"
STRATEGIES = {
    "FSDP": (FSDP, ""),
    "FSDP, full checkpointing": (FSDP, FULL),
    "DDP": (DDP, ""),
    "FSDP, full, offload": (FSDP, OFFLOAD),
}


def child(jobs: list[dict]) -> None:
    """Run configurations one after the other as one rank; exit with OUT_OF_MEMORY where it ends so.

    Each job: the place of the rank, the chapter and its arguments, and where to leave notes.
    """
    os.chdir(REPOSITORY)
    assert "torchao" not in sys.modules, "it has asked for the GPUs before the rank has its own"
    for job in jobs:
        os.environ |= {key: str(value) for key, value in job["place"].items()}
        sys.stderr = open(f"{job['notes']}.stderr", "w", buffering=1)  # noqa: PTH123, SIM115
        try:
            train(job["chapter"], job["words"], job["purpose"], job["notes"])
        except torch.OutOfMemoryError as error:
            print(error, file=sys.stderr)
            os._exit(OUT_OF_MEMORY)
        logging.getLogger().handlers.clear()  # each run makes its own
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            held = {"reserved": torch.cuda.max_memory_reserved()}
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            held["left_over"] = torch.cuda.memory_allocated()  # what the next run begins with
            Path(f"{job['notes']}.held").write_text(json.dumps(held))


def train(chapter: str, words: list[str], purpose: str, notes: str) -> None:
    """Run a chapter's script, less what is not measured."""
    from runner import load_script

    sys.argv = [f"{chapter}/train_llm.py", *words]
    script = load_script(REPOSITORY / chapter / "train_llm.py")
    script.evaluate = lambda *_: dict.fromkeys(("eval_loss", "perplexity", "bits_per_byte"), 0.0)
    script.models.sample_text = lambda *_: ("", "")
    if purpose == "saves":
        note_saves(script, f"{notes}.saves")
    else:
        script.save_checkpoint = lambda *_: None
    if purpose == "memory":  # the values do not matter then, and drawing takes minutes
        here = "cuda" if torch.cuda.is_available() else "cpu"
        script.AutoModelForCausalLM = Empty(None if chapter in (FSDP, MIXED) else here)
        script.set_model_state_dict = lambda *_, **__: None
        if not torch.cuda.is_available():
            pretend_to_be_short_of_memory(script, words)
    if chapter in (FSDP, MIXED):
        script.distributed.memory_bytes = lambda: 2**60  # some machines' grows as it is used
    script.main()


def pretend_to_be_short_of_memory(script, words: list[str]) -> None:
    """Fail at a number of blocks as a GPU would, so that the search can be tried on a CPU."""
    config = script.models.load_config(words[words.index("-m") + 1])
    if config.num_hidden_layers > 11:
        raise torch.OutOfMemoryError(f"{config.num_hidden_layers} blocks")


class Empty:
    """Makes models that nobody has filled: on the meta device or, if one is given, on that one."""

    def __init__(self, device: str | None) -> None:
        self.device = device

    def from_config(self, *args: object, **options: object) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM, PreTrainedModel

        PreTrainedModel.init_weights = lambda model: model.tie_weights()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(*args, **options)
        return model.to_empty(device=self.device) if self.device else model


def note_saves(script, path: str) -> None:
    """Write how long each call holds the training up; the save of the last step is left out.

    And within one, how long its parts take: those in which it waits for the disk, removes the
    checkpoint before, gives bytes to the system and sums them, and Python's own, which looks for
    garbage when many objects are made.
    """

    from common.checkpoint import asynchronous, manifest
    from common.checkpoint.files import SummingStream

    def note(name: str, start: float, seconds: float) -> None:
        with Path(path).open("a") as file:
            file.write(json.dumps({"what": name, "seconds": seconds, "at": start}) + "\n")

    def timed(name: str, function, part: bool = False):
        def call(*args: object) -> object:
            if torch.cuda.is_available() and not part:
                torch.cuda.synchronize()
            start, before = time.perf_counter(), written[0]
            found = function(*args)
            note(name, start, time.perf_counter() - start)
            if name == "save" and written[0] > before:
                note("sums and file cache", start, written[0] - before)
            return found

        return call

    written, begun = [0.0], [0.0]  # seconds of all writes, and when the last collection began

    def write(stream, data: object, function=SummingStream.write) -> int:
        start = time.perf_counter()
        count = function(stream, data)
        written[0] += time.perf_counter() - start
        return count

    def collected(phase: str, _: dict) -> None:
        now = time.perf_counter()
        if phase == "start":
            begun[0] = now
        elif now - begun[0] > 0.01:
            note("garbage", begun[0], now - begun[0])

    def not_last(save):
        def call(run_dir, model, optimizer, lr_scheduler, state, training, keep) -> None:
            if state["step"] < training["total_steps"]:
                save(run_dir, model, optimizer, lr_scheduler, state, training, keep)

        return call

    class Noting(script.AsyncCheckpoints):
        def __init__(self, timeout_s: int) -> None:
            super().__init__(timeout_s)
            self._wait = timed("wait for the one before", self._wait)
            self._copy = timed("copy", self._copy)
            self._save = not_last(timed("save", super().__call__))

        def __call__(self, *args: object) -> None:
            self._save(*args)

    asynchronous.write_content = timed("write", asynchronous.write_content)
    script.AsyncCheckpoints = Noting
    script.save_checkpoint = not_last(timed("save", script.save_checkpoint))
    SummingStream.write = write
    os.fsync = timed("disk", os.fsync, part=True)
    manifest._remove_all_but = timed("removal", manifest._remove_all_but, part=True)
    gc.callbacks.append(collected)


def start(series: list[dict], first: int, folder: Path) -> list:
    """Start the processes of configurations that follow each other, on GPUs from the first."""
    from runner import place_of

    gpus, nodes = series[0]["gpus"], series[0].get("nodes", 1)
    local = gpus // nodes
    threads = max(1, os.cpu_count() // max(8, torch.cuda.device_count()))
    jobs: list[list[dict]] = [[] for _ in range(gpus)]
    for configuration in series:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        name = file_name(configuration["label"])
        configuration |= {"store": store, "name": name}
        for rank in range(gpus):
            begin = first + rank // local * local
            place = place_of(rank, gpus) | {
                "LOCAL_RANK": rank % local,
                "LOCAL_WORLD_SIZE": local,
                "MASTER_PORT": store.port,
                "OMP_NUM_THREADS": threads,
                "CUDA_VISIBLE_DEVICES": visible_gpus(begin, local),
                "WANDB_MODE": "disabled",
            }
            jobs[rank].append(
                {
                    "place": place,
                    "chapter": configuration["chapter"],
                    "words": [*configuration["words"], "--save-dir", str(folder), "-e", name],
                    "purpose": configuration.get("purpose", "time"),
                    "notes": f"{folder}/{name}-{rank}",
                }
            )
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=child, args=(each,)) for each in jobs]
    for process in processes:
        process.start()
    return processes


def run(group: list[list[dict]], folder: Path, timeout: float) -> list[list[dict | None]]:
    """Run series of configurations, the series side by side; return what each run logged.

    None stands for a run whose memory was short; the series ends there.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started, first = [], 0
    for series in group:
        started.append(start(series, first, folder))
        first += series[0]["gpus"]
    deadline = time.monotonic() + timeout
    for processes in started:
        while any(process.exitcode is None for process in processes):
            if time.monotonic() > deadline or any(process.exitcode for process in processes):
                time.sleep(1)  # for the exit status of the one that has the reason
                for process in processes:
                    if process.exitcode is None:
                        os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.1)
    return [
        [read(configuration, processes, folder) for configuration in series]
        for series, processes in zip(group, started, strict=True)
    ]


def read(configuration: dict, processes: list, folder: Path) -> dict | None:
    name = configuration["name"]
    statuses = [process.exitcode for process in processes]
    done = folder / f"{name}-0.held" if torch.cuda.is_available() else folder / name / "state.json"
    if not done.exists() and (torch.cuda.is_available() or any(statuses)):
        if OUT_OF_MEMORY in statuses:
            return None
        stderr = folder / f"{name}-0.stderr"
        print(f"--- {name}: {statuses}", flush=True)
        print(stderr.read_text()[-1500:] if stderr.exists() else "not started", flush=True)
        return {"failed": statuses}
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    counted = [m for m in metrics if m["step"] > configuration["warm_up"] and "loss" in m]
    keys = [key for key, value in counted[0].items() if isinstance(value, float)]
    found = {key: statistics.median(line[key] for line in counted) for key in keys}
    held = folder / f"{name}-0.held"
    if held.exists():
        found |= {f"{key}_gib": n / 2**30 for key, n in json.loads(held.read_text()).items()}
    saves = folder / f"{name}-0.saves"
    if saves.exists():
        found["saves"] = [json.loads(line) for line in saves.read_text().splitlines()]
        found["total_ms"] = [line["time/total"] for line in metrics if "loss" in line]
    return found


def shaped_folder(source: Path, shape: dict[str, int], folder: Path) -> Path:
    """Write a folder with the configuration of a preset's file in another shape."""
    content = json.loads(source.read_text())
    unknown = set(shape) - set(content)
    assert not unknown, f"{source.parent.name} has no {unknown}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**content, **shape}))
    return folder


def model_folder(shape: Path, folder: Path, blocks: int | None = None, weights=False) -> Path:
    """Write a folder with a configuration, of so many blocks, and if asked for with weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shaped_folder(shape, {} if blocks is None else {"num_hidden_layers": blocks}, folder)
    if weights and not (folder / "model.safetensors.index.json").exists():
        # Drawn on a GPU: the values do not matter, and it takes seconds.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        model.to(torch.bfloat16).save_pretrained(
            folder, max_shard_size="4GB" if device == "cuda" else "1MB"
        )
    return folder


def weights_in_a_folder(shape: Path, folder: Path) -> Path:
    """Call model_folder in a process of its own, which alone touches the GPU."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=model_folder, args=(shape, folder, None, True))
    process.start()
    process.join()
    return folder


class Sets:
    def __init__(self, args: argparse.Namespace) -> None:
        self.gpus = torch.cuda.device_count() or 2
        self.tiny, self.args = args.tiny, args
        self.folder = Path(args.folder)
        self.shape = TINY if args.tiny else SHAPE
        self.seq_length = 64 if args.tiny else 2048
        self.rows: list[dict] = []
        self.start = time.monotonic()

    def time_left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.start)

    def go_on(self) -> None:
        """Take over the runs that the result file has already."""
        if self.args.append and self.args.output.exists():
            done = json.loads(self.args.output.read_text())["results"]["rows"]
            known = {row["label"]: row for row in done}
            for row in self.rows:
                if row["label"] in known:  # with the arguments that it had then
                    row |= known[row["label"]]
                    row["words"] = shlex.split(row["command"])[1:]

    def write(self, **more: object) -> None:
        keep = ("label", "strategy", "chapter", "gpus", "nodes", "command", "warm_up", "runs")
        keep += ("predicted", "blocks", "tries", "preset", "shape")
        rows = [{key: row[key] for key in keep if key in row} for row in self.rows]
        context = multiprocessing.get_context("forkserver")
        results = {**more, "rows": rows}
        process = context.Process(target=write_result, args=(self.args.output, results))
        process.start()  # it asks the GPU for its name
        process.join()

    def configure(
        self, label: str, chapter: str, gpus: int, args: str, steps: int, warm_up: int, **more
    ) -> dict:
        words = [*shlex.split(args), "--max-steps", str(steps), "--eval-freq", NEVER]
        if more.get("purpose") != "saves":
            words += ["--ckpt-freq", NEVER]
        return {
            **{"label": label, "chapter": chapter, "gpus": gpus, "words": words, "runs": []},
            **{"warm_up": warm_up, **more},
            "command": shlex.join([f"{chapter}/train_llm.py", *words]),
        }

    def once(self, *rows: dict) -> None:
        """Run configurations side by side, once, and write what was found."""
        timeout = min(300, max(60, self.time_left()))
        results = run([[row] for row in rows], self.folder / "runs", timeout)
        for row, (found,) in zip(rows, results, strict=True):
            row["runs"].append(found)
            shown = ("tokens_per_s_per_device", "peak_mem_gib")
            seen = found and {key: found.get(key) for key in shown}
            print(f"{time.monotonic() - self.start:5.0f} s  {row['label']}: {seen}", flush=True)
        self.write()

    def saved_model(self) -> Path:
        """Return a folder with weights of the shape, which all ranks read."""
        model = weights_in_a_folder(self.shape, self.folder / "model")
        print(f"{time.monotonic() - self.start:5.0f} s  the model's folder is there", flush=True)
        return model

    def options(self) -> None:
        model = self.saved_model()
        common = f"-m {model} --pretrained --tokenizer-name gpt2-tiny -b 1 --lr 1e-5 --log-freq 1"
        common += " -s 64" if self.tiny else " -s 8192"
        for label, args, runs in OPTIONS:
            batch = f"--global-batch-size {self.gpus}"
            if "2x" in args:
                batch = f"--global-batch-size {2 * self.gpus}"
                args = args.replace("--global-batch-size 2x", "")
            steps, warm_up = (3, 1) if "2 micro" in label or "offload" in label else (4, 2)
            nodes = 2 if "--hsdp" in args else 1
            words = f"{common} {batch} {args}"
            row = self.configure(label, FSDP, self.gpus, words, steps, warm_up, nodes=nodes)
            row["wanted"] = runs
            self.rows.append(row)
        self.go_on()
        self.in_turns()

    def precision(self) -> None:
        model = self.saved_model()
        common = f"-m {model} --pretrained --tokenizer-name gpt2-tiny --lr 1e-5 --log-freq 1"
        common += f" {SELECTIVE}" + (" -s 64" if self.tiny else " -s 8192")
        for label, args, steps, warm_up, runs in PRECISION:
            if "fp8" in args and not torch.cuda.is_available():
                continue
            sequences = 2 if "-b 2x" in args else 1
            args = args.replace("-b 2x", "")
            batch = f"-b {sequences} --global-batch-size {sequences * self.gpus}"
            row = self.configure(
                label, MIXED, self.gpus, f"{common} {batch} {args}", steps, warm_up
            )
            row["wanted"] = runs
            self.rows.append(row)
        self.go_on()
        self.in_turns()

    def length(self) -> None:
        rows = [
            (f"{length} tokens", {"n_positions": length}, f"{words} --precision bf16")
            for length, words in self.lengths()
        ]
        self.grow("gpt2", rows)

    def length_llama(self) -> None:
        rows = [
            (
                f"4 blocks, {length} tokens",
                {"num_hidden_layers": 4, "max_position_embeddings": length},
                f"{words} --precision bf16 {SELECTIVE}",
            )
            for length, words in self.lengths()
        ]
        self.grow("llama-3.1-8b", rows)

    def size(self) -> None:
        words = "-s 32 -b 2" if self.tiny else "-s 1024 -b 16"
        words += f" --global-batch-size {words.split()[-1]} --precision bf16 {SELECTIVE}"
        rows = [
            (size, dict(zip(("n_layer", "n_embd", "n_head"), shape, strict=True)), words)
            for size, shape in SIZES.items()
        ]
        self.grow("gpt2", rows[:1] if self.tiny else rows)

    def lengths(self) -> list[tuple[int, str]]:
        """Return sequence lengths and arguments, with as many tokens in a step for each."""
        powers, tokens = (range(4, 6), 2**6) if self.tiny else (range(10, 16), 2**15)
        found = []
        for length in (2**power for power in powers):
            batch = tokens // length
            found.append((length, f"-s {length} -b {batch} --global-batch-size {batch}"))
        return found

    def grow(self, preset: str, rows: list[tuple[str, dict, str]]) -> None:
        """Run chapter 5 on one GPU: label, what differs from the preset, arguments of each.

        Its tokenizer is a small one: with the real vocabulary in the shape, logits are real.
        """
        for label, shape, args in rows:
            name = f"{preset}, {label}"
            folder = self.folder / "shapes" / file_name(name)
            source = f"{preset.split('-')[0]}-tiny" if self.tiny else preset
            shaped_folder(PRESETS / source / "config.json", {} if self.tiny else shape, folder)
            words = f"-m {folder} --tokenizer-name gpt2-tiny --lr 1e-4 --log-freq 2 {args}"
            words += "" if self.tiny else " --compile"
            row = self.configure(name, MIXED, 1, words, 12, 4, preset=preset, shape=shape)
            row["wanted"] = 1
            self.rows.append(row)
        self.go_on()
        self.in_turns()

    def in_turns(self) -> None:
        """Run all rows once, and then those that want more runs again."""
        for turn in range(3):
            wanted = [
                row
                for row in self.rows
                if row["wanted"] > turn >= len(row["runs"])
                and fnmatch.fnmatchcase(row["label"], self.args.only)
            ]
            for nodes in (1, 2):  # other places need other processes
                if series := [row for row in wanted if row.get("nodes", 1) == nodes]:
                    self.in_turn(series)

    def in_turn(self, rows: list[dict]) -> None:
        """Run configurations one after the other in the same processes, and write the results."""
        while rows and self.time_left() > 45:
            (results,) = run([rows], self.folder / "runs", self.time_left())
            ended = next(
                (i for i, r in enumerate(results) if r is None or "failed" in r), len(rows)
            )
            for row, found in zip(rows[: ended + 1], results, strict=False):
                row["runs"].append(found)
                shown = ("tokens_per_s_per_device", "peak_mem_gib", "left_over_gib")
                print(
                    f"{row['label']}: {found and {key: found.get(key) for key in shown}}",
                    flush=True,
                )
            self.write()
            rows = rows[ended + 1 :]  # anew after one that has ended the processes

    def gpt2(self) -> None:
        args = "-m gpt2-tiny -b 4" if self.tiny else "-m gpt2 -s 1024 -b 64 --compile --lr 3e-4"
        counts = [n for n in (8, 4, 2, 1) if n <= self.gpus]
        for gpus in counts:
            for chapter in (DDP, FSDP):
                batch = (4 if self.tiny else 64) * gpus
                words = f"{args} --global-batch-size {batch} --log-freq 5"
                label = f"{chapter} on {gpus}"
                self.rows.append(self.configure(label, chapter, gpus, words, 20, 10))
        self.go_on()
        for chapter in (DDP, FSDP):  # the smaller numbers of GPUs once, side by side
            rest = [r for r in self.rows if r["gpus"] < counts[0] and r["chapter"] == chapter]
            if rest and not rest[0]["runs"]:
                self.once(*rest)
        for turn in range(3):
            for row in [row for row in self.rows if row["gpus"] == counts[0]]:
                if turn >= len(row["runs"]) and self.time_left() > 25:
                    self.once(row)

    def largest(self) -> None:
        """Search for all, as many side by side as there are GPUs for.

        With offload on all GPUs only, and once: it is the host that ends it, and it is one host.
        """
        predicted = self.predict_largest()
        counts = [n for n in (8, 4, 2, 1) if n <= self.gpus]
        cells = [
            Cell(strategy, n, predicted[strategy, n], self)
            for strategy, (_, words) in STRATEGIES.items()
            for n in (counts if words != OFFLOAD else counts[:1])
        ]
        cells = [cell for cell in cells if fnmatch.fnmatchcase(cell.label, self.args.only)]
        assert cells, f"there is no search {self.args.only}"
        if self.args.append and self.args.output.exists():
            self.rows = json.loads(self.args.output.read_text())["results"]["rows"]
        while searched := self.fitting(cells):
            for cell in searched:
                cell.prepare()
                others = [row for row in self.rows if row["label"] != cell.label]
                self.rows = [*others, cell.row]
            alone = searched[0].options == OFFLOAD  # fills the memory of the host, which is slow
            timeout = self.time_left() if alone else 100
            found = run([[cell.row] for cell in searched], self.folder / "runs", timeout)
            for cell, (each,) in zip(searched, found, strict=True):
                cell.learn(each)
                seconds = time.monotonic() - self.start
                print(f"{seconds:5.0f} s  {cell.label}: {cell.row['tries'][-1]}", flush=True)
            self.write(
                seq_length=self.seq_length,
                memory_gib=self.args.memory,
                host_memory_gib=self.args.host_memory,
            )

    def fitting(self, cells: list["Cell"]) -> list["Cell"]:
        """Return the cells to try next, side by side; none when the time is over."""
        chosen, free = [], self.gpus
        for cell in cells:
            enough = 30 if cell.options != OFFLOAD else 150
            if cell.blocks and cell.gpus <= free and self.time_left() > enough:
                chosen.append(cell)
                free -= cell.gpus
        return chosen

    def predict_largest(self) -> dict[tuple[str, int], int]:
        """Return where 04-fsdp/memory.py says that the search ends: memory is linear in blocks."""
        if self.tiny:
            return {(strategy, n): 13 for strategy in STRATEGIES for n in (1, 2, 4, 8)}
        from runner import load_script

        memory = load_script(REPOSITORY / "04-fsdp/memory.py")
        counted = {4: {}, 8: {}}
        predicted = {}
        for strategy, (chapter, words) in STRATEGIES.items():
            for gpus in (1, 2, 4, 8):
                options = memory.Options(
                    sharding="ddp" if chapter == DDP else "fsdp",
                    gpus=gpus,
                    batch_size=1,
                    seq_length=self.seq_length,
                    activation_checkpointing="full" if FULL in words else "none",
                    cpu_offload=words == OFFLOAD,
                )
                found = {}
                for blocks in counted:
                    config = memory.models.load_config("llama-3.1-8b")
                    config.num_hidden_layers = blocks
                    found[blocks] = memory.predict(config, options, counted[blocks])
                ends = []
                limits = {"peak": USABLE * self.args.memory}
                if words == OFFLOAD:  # what a rank may have of the host
                    limits["host"] = USABLE_HOST * self.args.host_memory / gpus
                for key, limit in limits.items():
                    four, eight = found[4][key] / 2**30, found[8][key] / 2**30
                    ends.append(int(8 + (limit - eight) / ((eight - four) / 4)))
                predicted[strategy, gpus] = min(ends)
        return predicted

    def checkpoint(self) -> None:
        args = f"-m {self.saved_model()} --pretrained --tokenizer-name gpt2-tiny -b 1 --lr 1e-5"
        args += f" --global-batch-size {self.gpus} {FULL} -s {self.seq_length}"
        self.saves(FSDP, self.gpus, args)

    def gpt2_checkpoint(self) -> None:
        args = "-m gpt2-tiny -b 4 --global-batch-size 4"
        if not self.tiny:
            args = "-m gpt2 -s 1024 -b 64 --global-batch-size 64 --compile --lr 3e-4"
        self.saves(MIXED, 1, args, steps=40)

    def saves(self, chapter: str, gpus: int, args: str, steps: int = 20) -> None:
        """Train with a checkpoint after every 10 steps, written beside the training or not."""
        args += " --log-freq 1 --keep-checkpoints 1 --ckpt-freq 10"
        for label, more in (("async", " --async-checkpoint"), ("sync", "")):
            row = self.configure(label, chapter, gpus, args + more, steps, 3, purpose="saves")
            self.rows.append(row)
            self.once(row)


class Cell:
    """The search for the most blocks that a strategy trains on some GPUs.

    It begins where memory.py expects the end, and ends when the next larger number, by one block or
    2%, has been seen to fail.
    """

    def __init__(self, strategy: str, gpus: int, predicted: int, sets: Sets) -> None:
        self.chapter, self.options = STRATEGIES[strategy]
        self.label, self.gpus, self.sets = f"{strategy} on {gpus}", gpus, sets
        self.row = {"label": self.label, "gpus": gpus, "chapter": self.chapter, "tries": []}
        self.row |= {"strategy": strategy, "predicted": predicted}
        self.step = max(1, predicted // 50)
        self.works: set[int] = set()
        self.fails: set[int] = set()
        self.blocks: int | None = predicted

    def prepare(self) -> None:
        sets = self.sets
        folder = model_folder(sets.shape, sets.folder / f"shape-{self.blocks}", self.blocks)
        args = f"-m {folder} --tokenizer-name gpt2-tiny -s {sets.seq_length} -b 1 --lr 1e-5"
        args += f" --global-batch-size {self.gpus} --log-freq 1 {self.options}"
        row = sets.configure(self.label, self.chapter, self.gpus, args, 2, 1, purpose="memory")
        self.row |= {key: value for key, value in row.items() if key != "runs"}

    def learn(self, found: dict | None) -> None:
        """Note what the run said, and choose the next number of blocks, or none."""
        if found is not None and "failed" in found:
            self.row["tries"].append({"blocks": self.blocks, **found})
            self.blocks = None
            return
        peak = None if found is None else round(found["peak_mem_gib"], 2)
        self.row["tries"].append({"blocks": self.blocks, "peak_mem_gib": peak})
        (self.fails if found is None else self.works).add(self.blocks)
        most, least = max(self.works, default=0), min(self.fails, default=None)
        self.row["blocks"] = most
        if least is None:
            self.blocks = most + self.step if self.options != OFFLOAD else None
        elif least - most > self.step:
            self.blocks = least - self.step
        else:
            self.blocks = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sets = ["options", "precision", "gpt2", "largest", "checkpoint", "gpt2-checkpoint"]
    sets += ["length", "length-llama", "size"]
    parser.add_argument("set", choices=sets)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--folder", default=tempfile.gettempdir() + "/fsdp", help="for models, runs"
    )
    parser.add_argument("--seconds", type=float, default=3600, help="begin no run after these")
    parser.add_argument("--memory", type=float, default=140.4, help="GiB that a GPU has")
    parser.add_argument("--host-memory", type=float, default=512, help="GiB that the host has")
    parser.add_argument(
        "--only", default="*", help="labels, as in 'tf32*'; not of gpt2, *checkpoint"
    )
    parser.add_argument("--append", action="store_true", help="add to the runs of the output")
    parser.add_argument("--tiny", action="store_true", help="small models, to try this file")
    args = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    getattr(Sets(args), args.set.replace("-", "_"))()


if __name__ == "__main__":
    main()
