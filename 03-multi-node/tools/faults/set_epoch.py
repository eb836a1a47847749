"""set_epoch is never called, so every epoch has the sample order of the first epoch."""

from faults.lab import Lab

NO_SET_EPOCH = """\
-            sampler.set_epoch(epoch, start=epoch_step * micro_batch_size * accumulation)
"""


def show_fault(lab: Lab) -> None:
    first, second = lab.train_and_check_order("set-epoch", NO_SET_EPOCH)
    lab.expect(first.complete and second.complete, "each epoch should take every sample")
    same = first.first_samples == second.first_samples
    lab.expect(same, "both epochs should have the same order")


def show_fix(lab: Lab) -> None:
    first, second = lab.train_and_check_order("set-epoch")
    lab.expect(first.complete and second.complete, "each epoch should take every sample")
    same = first.first_samples == second.first_samples
    lab.expect(not same, "the epochs should have different orders")
