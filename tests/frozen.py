"""Imported last by a server that forks: what it has imported is there to stay.

No child looks through it for garbage, which would also copy its pages.
"""

import gc

gc.freeze()
