"""Several processes that train one model, or parse one corpus, as torchrun starts them.

    torchrun --nproc_per_node=2 run.py job=train ...

All of them have all trees, and go through the same steps. Each computes its share of the trees, the sums go round, and
what is made of the sums is the same everywhere. The first process alone prints, writes, and looks at dev. In a single
process all of this does nothing.

What waits for another process looks for signals while it waits: torchrun ends all processes when one has ended.
"""

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from lvpcfg.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.distributed_c10d import ProcessGroup, Store

Item = TypeVar("Item")
CONNECT, WAIT = timedelta(minutes=5), timedelta(days=7)  # while one looks at dev, the others wait
MOMENT = 1e-4  # seconds between two looks whether a sum is there
PATIENCE = 10  # seconds in which the first process can say why it ended, and the others do not
TOLD = "told"

_store: "Store | None" = None  # a dictionary that the processes share, when they have found each other
_group: "ProcessGroup | None" = None  # those that wait for each other


class LostError(InputError):
    """Another process of the training has ended."""


def number() -> int:
    """Of processes that torchrun started."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    return int(os.environ["RANK"]) if number() > 1 else 0


def is_first() -> bool:
    return rank() == 0


def begin() -> None:
    """Finds the other processes."""
    global _store, _group
    if number() == 1 or _store is not None:
        return
    from torch import distributed
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is nothing to save, and torch would not hear it
    try:
        store, *_ = next(rendezvous("env://", timeout=CONNECT))
        # torchrun that begins again keeps its store, with all that is in it.
        store = PrefixStore(f"lvpcfg/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        distributed.init_process_group(store=store, rank=rank(), world_size=number(), timeout=CONNECT)
        _group = distributed.new_group(timeout=WAIT)
    except RuntimeError as error:
        raise InputError(f"the {number()} processes do not find each other: {str(error).splitlines()[0]}") from None
    finally:
        signal.signal(signal.SIGTERM, before)
    _store = store


def own_device(device: "torch.device") -> "torch.device":
    """Each process has a CUDA device to itself."""
    import torch

    if _store is None or device.type == "cpu":
        return device
    here, devices = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if device.index is not None or here > devices:
        raise InputError(
            f"device is {str(device)!r}, for {here} processes on {devices} CUDA device{'s' * (devices != 1)}: "
            "expected 'cuda' and no more processes than devices, or 'cpu'."
        )
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)
    return own


def share(items: Sequence[Item]) -> Sequence[Item]:
    """Those that are computed here."""
    return items if _store is None else items[rank() :: number()]


def sum_over_processes(tensor: "Tensor") -> "Tensor":
    """The same everywhere, bit for bit; the tensor itself may be changed."""
    if _store is None or not tensor.numel():
        return tensor
    from torch import distributed

    tensor = tensor.contiguous()
    try:
        work = distributed.all_reduce(tensor, group=_group, async_op=True)
        assert work is not None
        while not work.is_completed():
            time.sleep(MOMENT)
        work.wait()
    except RuntimeError as error:
        raise _lost(error) from None
    return tensor


def _lost(error: RuntimeError) -> LostError:
    reason = re.sub(r"^\[\S*\] |\. .*", "", str(error).splitlines()[0])
    return LostError(f"another of the {number()} processes has ended, or cannot be reached: {reason}.")


def total(name: str, number: int) -> int:
    """Adds to a number that all processes share, and returns the sum so far."""
    assert _store is not None
    try:
        return _store.add(name, number)
    except RuntimeError as error:
        raise _lost(error) from None


def from_first(value: Any) -> Any:
    """What the first process has, in all; plain JSON."""
    if _store is None:
        return value
    import torch

    data = json.dumps(value).encode() if is_first() else b""
    size = int(sum_over_processes(torch.tensor(len(data))))
    numbers = torch.tensor(list(data) if is_first() else [0] * size, dtype=torch.uint8)
    return json.loads(bytes(sum_over_processes(numbers).tolist()))


def expect_same(what: str, value: Any) -> None:
    """Stops all processes where they do not have the same value, plain JSON. Until all have one, none goes on."""
    if _store is None:
        return
    import torch

    mine = json.dumps(value, sort_keys=True)
    different = torch.tensor(int(mine != from_first(mine)))
    if int(sum_over_processes(different)):
        raise InputError(f"the {number()} processes have read different {what}: all of them need the same files.")


@contextmanager
def one_speaks() -> Iterator[None]:
    """Nothing is printed but by the first process; and of those that end with an error, one alone says so."""
    if number() == 1:
        yield
        return
    try:
        with _silence():
            yield
    except BaseException as reason:
        if (isinstance(reason, SystemExit) and not reason.code) or _may_speak():
            raise
        raise SystemExit(1) from None
    if _store is not None:
        from torch import distributed

        distributed.destroy_process_group()


@contextmanager
def _silence() -> Iterator[None]:
    if is_first():
        yield
    else:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield


def _may_speak() -> bool:
    """Whether no other process says why the training ends. The others leave it to the first one, if that can."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL if _store is None else signal.SIG_IGN)
    end = time.monotonic() + PATIENCE
    with suppress(RuntimeError):  # the store ends with torchrun
        while not is_first() and time.monotonic() < end:
            if _store is not None and _store.check([TOLD]):
                return False
            time.sleep(0.05)
        return _store is None or _store.add(TOLD, 1) == 1
    return True
