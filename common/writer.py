"""Files of a checkpoint, and why they could not be written."""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.futures import Future


class Writer(dcp.FileSystemWriter):
    """Fails with the operating system's reason, which else is lost on the way to other ranks.

    A full disk is a RuntimeError of the writer of PyTorch's files, with the real error in its
    context, and what goes from rank to rank has no context.
    """

    def write_data(self, *args: object) -> Future:
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            link: BaseException | None = error
            while link is not None:
                if isinstance(link, OSError):
                    raise link from error
                link = link.__cause__ or link.__context__
            raise


def cause_of(error: BaseException) -> str:
    """Return the operating system's reason in one line; raise what is no error of a file.

    CheckpointException holds an exception for each rank, Ctrl-C among them.
    """
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    raise error
