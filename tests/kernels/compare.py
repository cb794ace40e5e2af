"""The comparison of two versions of an op, in one place."""

import torch


def agree(reference, version, *args, tolerance=0.0, wide=0):
    """Run both on copies of the tensors in `args`, and return the results of `version`.

    Results and arguments must then agree: in dtype, shape and every bit, or within a relative
    tolerance where an op adds in another order: `reference` then gets argument `wide` in fp64.
    The counters of the kernels must be at rest.
    """

    def widened(*copies):
        return reference(*copies[:wide], copies[wide].double(), *copies[wide + 1 :])

    expected, theirs = _call(widened if tolerance else reference, args)
    results, changed = _call(version, args)
    assert len(expected) == len(results)
    for a, b in zip([*expected, *theirs], [*results, *changed], strict=True):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if tolerance:
            assert torch.isclose(a, b, rtol=tolerance, atol=1e-44, equal_nan=True).all(), (a, b)
        else:
            assert torch.equal(_bits(a), _bits(b)), (a, b)
    if version.__name__.endswith("_triton"):
        _counters_rest(next(t.device for t in changed))
    return results


def _call(version, args):
    """Return the results, and the copies of the tensors in `args` as the call left them."""
    copies = [_copy(arg) for arg in args]
    results = version(*copies)
    if isinstance(results, torch.Tensor):
        results = (results,)
    return list(results or ()), list(_tensors(copies))


def _copy(thing):
    """Copy tensors with their storage: a slice stays where it was, aligned or not."""
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage().clone()
        empty = torch.empty(0, dtype=thing.dtype, device=thing.device)
        return empty.set_(storage, thing.storage_offset(), thing.shape, thing.stride())
    return type(thing)(map(_copy, thing)) if type(thing) in (list, tuple) else thing


def _tensors(thing):
    if isinstance(thing, torch.Tensor):
        yield thing
    elif type(thing) in (list, tuple):
        for part in thing:
            yield from _tensors(part)


def _bits(tensor):
    """Return what must be equal: the bits, with one NaN for all of them."""
    if not tensor.is_floating_point():
        return tensor
    plain = torch.where(tensor.isnan(), torch.nan, tensor)
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return plain.view(kinds[tensor.element_size()])


def _counters_rest(device):
    from gradwire.kernels.triton.select.turns import HEADER
    from gradwire.kernels.triton.workspace import workspace

    assert not workspace(0, device)[0][: HEADER.value].any(), "counters must be zero after a launch"
