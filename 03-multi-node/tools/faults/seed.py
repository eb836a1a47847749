"""Each rank has its own seed. Nothing fails, but some samples are used twice and others never."""

from faults.lab import Lab

SEED = """\
-    torch.manual_seed(args.seed)
+    torch.manual_seed(args.seed + rank)
@@
-    sampler = ResumableSampler(train_data, num_replicas=world_size, rank=rank, seed=args.seed)
+    sampler = ResumableSampler(train_data, world_size, rank, seed=args.seed + rank)
"""


def show_fault(lab: Lab) -> None:
    epochs = lab.train_and_check_order("seed", SEED)
    complete = [epoch.complete for epoch in epochs]
    lab.expect(complete == [False, False], "each epoch should miss some samples")
    # DDP has broadcast the weights of rank 0, so the first of the two changes has no effect.
    equal = all(len(epoch.weight_sums) == 1 for epoch in epochs)
    lab.expect(equal, "all ranks should have the same weights")


def show_fix(lab: Lab) -> None:
    epochs = lab.train_and_check_order("seed")
    complete = [epoch.complete for epoch in epochs]
    lab.expect(complete == [True, True], "each epoch should take every sample")
