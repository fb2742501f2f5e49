"""Peak memory as PyTorch's own counter has it: there is none for the CPU outside the profiler."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Peak of what the CPU allocator gave out during ``run``, kernel buffers included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    memory = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    assert memory
    peak = total = 0
    for _, size in sorted(memory, key=lambda event: event[0]):
        total += size
        peak = max(peak, total)
    return peak
