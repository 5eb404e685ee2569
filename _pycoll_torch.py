"""What torch loads at the end of `import torch` (its entry point group `torch.backends`).

It stands outside the package, and imports nothing of it: programs that do not use pycoll must not
notice. The rest follows when a process group asks for the backend.
"""


def register() -> None:
    """Makes `init_process_group("pycoll")` known to torch, once."""
    from torch import distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "PYCOLL"):
        # A list: of a string torch takes the letters for devices.
        dist.Backend.register_backend(
            "pycoll", _make_backend, extended_api=True, devices=["cpu", "cuda"]
        )


def _make_backend(given, options):  # type: ignore[no-untyped-def]
    import pycoll.torch

    return pycoll.torch.make_backend(given, options)
