"""Peak of what torch's CPU allocator gives out: torch keeps no such count itself."""

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run) -> int:
    """Peak over what was held before, kernel buffers included, while ``run`` runs."""
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
