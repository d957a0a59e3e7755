"""How the processes that torchrun has started find each other.

torchrun starts processes again after one has died, and when hosts leave or join. Its store then still holds what the dead ones
wrote, and no variable of the environment counts these starts alike on all hosts: each torchrun counts its own.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_SECONDS = 0.02


def name_of_start(store: Store, rank: int, size: int) -> str:
    """A new name, the same on all processes, for their present start; all of them call this.

    Each of the others leaves a word of its own and waits for the answer to this word, so that it never takes an answer to a
    process that is dead. The first answers every word until all have got its name.
    """
    if rank:
        store.set(f"arrived {rank}", word := uuid.uuid4().hex)
        name = store.get(f"answer to {word}").decode()
        store.set(f"{name} reached {rank}", "")
        return name
    name, others = uuid.uuid4().hex, set(range(1, size))
    answered: set[bytes] = set()
    while others:
        for each in sorted(others):
            key = f"arrived {each}"
            if store.check([key]) and (word := store.get(key)) not in answered:
                store.set(f"answer to {word.decode()}", name)
                answered.add(word)
            if store.check([f"{name} reached {each}"]):
                others.remove(each)
        time.sleep(POLL_SECONDS)
    return name
