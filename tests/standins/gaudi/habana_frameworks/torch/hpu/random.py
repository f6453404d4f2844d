"""The card's generator; states of index 0 alone."""

import habana_standin


def _default_generator():
    import habana_frameworks.torch.hpu as hpu

    hpu.init()
    _C = habana_standin.cards()
    return _C.default_generator(_C.current_device())


class _Generators(list):
    """The one generator, made when it is asked for: the card is not taken at import."""

    def __getitem__(self, index):
        if index != 0:
            raise IndexError(index)
        return _default_generator()


default_generators = _Generators()


def get_rng_state(device="hpu"):
    _only_first(device, "get_rng_state")
    return _default_generator().get_state()


def set_rng_state(new_state, device="hpu"):
    _only_first(device, "set_rng_state")
    _default_generator().set_state(new_state)


def _only_first(device, name):
    from ._utils import _get_device_index

    if _get_device_index(device, optional=True) != 0:
        raise RuntimeError(f"hpu {name} supports only device 0")


def manual_seed(seed):
    return _default_generator().manual_seed(int(seed))


def manual_seed_all(seed):
    manual_seed(seed)


def seed():
    return _default_generator().seed()


def seed_all():
    _default_generator().seed()


def initial_seed():
    return _default_generator().initial_seed()


def get_rng_state_all():
    return [get_rng_state(0)]


def set_rng_state_all(new_states):
    for state in new_states:
        set_rng_state(state, 0)
