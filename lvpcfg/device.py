"""Where numbers are kept and computed."""

import torch

from lvpcfg.errors import InputError, show


def usable_device(name: str | torch.device | None) -> torch.device:
    """The device of that name; None: CUDA if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # the device "meta" has no numbers
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
        raise InputError(f"device is {show(str(name))}, which cannot be used here: {reason}.") from None
    return device
