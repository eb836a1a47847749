"""Checkpoints of a run whose learning rate decays at its end; wsd.diff uses them.

A run with the schedule warm-up, stable, decay (WSD, https://arxiv.org/abs/2404.06395) can train
longer than planned: until the decay begins, no step depends on the planned end. So the last
checkpoint before the decay is kept, and a new run with --extend begins with it. The finished run
stays as it is.
"""

import argparse
import logging
import shutil
from pathlib import Path

from common import checkpoint, storage
from common.errors import RunError

logger = logging.getLogger(__name__)


def check_decay(args: argparse.Namespace, total_steps: int) -> None:
    """Raise RunError if warm-up and decay take more steps than there are."""
    if args.warmup_steps + args.decay_steps > total_steps:
        raise RunError(
            f"--warmup-steps {args.warmup_steps} and --decay-steps {args.decay_steps} are together "
            f"more than the {total_steps} steps of this run: give smaller ones."
        )


def decay_start(settings: dict) -> int:
    """Return after how many steps the decay begins, in a run with these settings."""
    return settings["total_steps"] - settings["decay_steps"]


def extendable(base: type[checkpoint.Checkpoints]) -> type[checkpoint.Checkpoints]:
    """Return a subclass of the chapter's checkpoints, or of another variant's."""

    class Extendable(base):
        """Keeps the last checkpoint before the decay; with --extend, begins with another run's.

        schedule: an entry of the settings, so that only a script with this variant resumes the run.
        """

        def __init__(
            self, args: argparse.Namespace, run_dir: Path, settings: dict, schedule: str
        ) -> None:
            settings = {name: value for name, value in settings.items() if name != "extend"}
            of_variant = sorted([*settings["of_variant"], "schedule"])
            super().__init__(
                args, run_dir, {**settings, "schedule": schedule, "of_variant": of_variant}
            )
            self.extended = run_dir.parent / args.extend if args.extend else None
            self.checkpoint_dir = args.checkpoint_dir

        def load(self, *run: object) -> bool:
            loaded = super().load(*run)
            self._say_how_to_extend(run[-1])
            return loaded

        def save(self, *run: object) -> None:
            super().save(*run)
            self._say_how_to_extend(run[-1])

        def _say_how_to_extend(self, state: dict) -> None:
            if state["step"] == self.settings["total_steps"]:
                logger.info(
                    "to train longer, give another -e, a larger --max-steps and --extend "
                    f"{self.run_dir.name}: the new run begins before the decay of this one"
                )

        def _find_newest(self, folder: Path) -> tuple[Path, dict] | None:
            """Return the newest checkpoint of this run, or the one to extend."""
            newest = super()._find_newest(folder)
            if newest is None and self.extended is not None:
                return self._find_before_decay()
            return newest

        def _find_before_decay(self) -> tuple[Path, dict]:
            """Return the last checkpoint that both runs have in common, and copy its metrics."""
            name = self.extended.name
            folder = self.extended / "checkpoints"
            if self.checkpoint_dir:
                folder = storage.as_path(self.checkpoint_dir) / name
            complete = checkpoint.complete_checkpoints(folder)
            if not complete:
                raise RunError(f"--extend {name}: {folder} has no complete checkpoint.")
            saved = checkpoint.read_settings(complete[max(complete)])
            if saved.get("schedule") != self.settings["schedule"]:
                raise RunError(f"--extend {name}: the variant wsd has not trained this run.")
            # These two may change, because no step before the decay depends on them.
            planned = {key: self.settings[key] for key in ("total_steps", "decay_steps")}
            if (other := checkpoint.difference({**saved, **planned}, self.settings)) is not None:
                raise RunError(f"--extend {name}: the run was started with {other}.")
            start = min(decay_start(saved), decay_start(self.settings))
            before = [step for step in complete if step <= start]
            if not before:
                raise RunError(
                    f"--extend {name}: the run has no checkpoint of its first {start} steps, after "
                    "which a decay begins: start a new run without --extend."
                )
            if (self.extended / "metrics.jsonl").exists():  # the tracker deletes later lines
                shutil.copy(self.extended / "metrics.jsonl", self.run_dir)
            logger.info(f"the run begins with {complete[before[-1]]}")
            return complete[before[-1]], {**saved, **planned}

        def _surplus(self) -> list[Path]:
            steps = checkpoint.complete_checkpoints(self.folder)
            before = [path for step, path in steps.items() if step <= decay_start(self.settings)]
            return [path for path in super()._surplus() if path not in before[-1:]]

    return Extendable
