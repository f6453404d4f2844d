"""Wrong devices in random numbers and their states: see `tests.testing.wrong`."""

from __future__ import annotations

from typing import Any

from tests.testing.wrong import Wrong, mutant, torch
from tests.testing.wrong_products import wrong

# -- distributions --------------------------------------------------------------------------------

DROPOUT, NUMBERS = "dropout_is_sound", "random_numbers_are_sound"


@wrong("dropout has rates in eighths", DROPOUT, "native_dropout")
def _(usual: Any, x: Any, rate: float, train: Any) -> Any:
    return usual(x, round(rate * 8) / 8, train)


@wrong("dropout keeps what it should drop", DROPOUT, "native_dropout")
def _(usual: Any, x: Any, rate: float, train: Any) -> Any:
    return usual(x, 1 - rate, train)


@wrong("dropout does not scale", DROPOUT, "native_dropout")
def _(usual: Any, x: Any, rate: float, train: Any) -> Any:
    out, mask = usual(x, rate, train)
    return out * (1 - rate), mask


@wrong("dropout repeats its mask after 256 values", DROPOUT, "native_dropout")
def _(usual: Any, x: Any, rate: float, train: Any) -> Any:
    _, mask = usual(x.reshape(-1)[:256], rate, train)
    mask = mask.repeat(x.numel() // 256 + 1)[: x.numel()].reshape(x.shape)
    return x * mask / (1 - rate), mask


@wrong("dropout drops pairs", DROPOUT, "native_dropout")
def _(usual: Any, x: Any, rate: float, train: Any) -> Any:
    _, mask = usual(x, rate, train)
    flat = mask.reshape(-1)
    flat[1::2] = flat[: flat.numel() // 2 * 2 : 2]
    return torch.where(mask, x / (1 - rate), 0).to(x.dtype), mask


@wrong("the gradient of dropout has no mask", DROPOUT, "native_dropout_backward")
def _(usual: Any, grad: Any, mask: Any, scale: float) -> Any:
    return grad * scale


@wrong("the gradient of dropout is not scaled", DROPOUT, "native_dropout_backward")
def _(usual: Any, grad: Any, mask: Any, scale: float) -> Any:
    return grad * mask


@wrong("rand has 8 bits", NUMBERS, "rand")
def _(usual: Any, *args: Any, **kwargs: Any) -> Any:
    return (usual(*args, **kwargs) * 256).floor() / 256


@wrong("rand repeats itself after 1024 numbers", NUMBERS, "rand")
def _(usual: Any, sizes: Any, **kwargs: Any) -> Any:
    count = torch.Size(sizes).numel()
    return usual([1024], **kwargs).repeat(count // 1024 + 1)[:count].reshape(sizes)


@wrong("randn is of squares", NUMBERS, "randn")
def _(usual: Any, *args: Any, **kwargs: Any) -> Any:
    out = usual(*args, **kwargs)
    return out.sign() * out.pow(2) / 3**0.5


@wrong("randn is 2% too wide", NUMBERS, "randn")
def _(usual: Any, *args: Any, **kwargs: Any) -> Any:
    return usual(*args, **kwargs) * 1.02


@wrong("randn has no tails", NUMBERS, "randn")
def _(usual: Any, *args: Any, **kwargs: Any) -> Any:
    return usual(*args, **kwargs).clamp(-3.5, 3.5)


@wrong("normal_ forgets its mean", NUMBERS, "normal_")
def _(usual: Any, x: Any, mean: float = 0, std: float = 1, **kwargs: Any) -> Any:
    return usual(x, 0, std, **kwargs)


@wrong("normal_ takes a variance", NUMBERS, "normal_")
def _(usual: Any, x: Any, mean: float = 0, std: float = 1, **kwargs: Any) -> Any:
    return usual(x, mean, std**0.5, **kwargs)


@wrong("uniform_ begins at 0", NUMBERS, "uniform_")
def _(usual: Any, x: Any, low: float = 0, high: float = 1, **kwargs: Any) -> Any:
    return usual(x, 0, high, **kwargs)


@wrong("randint never gives its last number", NUMBERS, "randint")
def _(usual: Any, low: int, high: int, *args: Any, **kwargs: Any) -> Any:
    return usual(low, high - 1, *args, **kwargs)


@wrong("randperm moves the second half alone", NUMBERS, "randperm")
def _(usual: Any, n: int, **kwargs: Any) -> Any:
    first = torch.arange(n // 2, device="sim")
    return torch.cat((first, n // 2 + usual(n - n // 2, **kwargs)))


@wrong("bernoulli is even", NUMBERS, "bernoulli")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    return usual(torch.full_like(x, 0.5), **kwargs)


@wrong("multinomial forgets weights", NUMBERS, "multinomial")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return usual(torch.ones_like(x), *args, **kwargs)


# -- seeds ----------------------------------------------------------------------------------------

SEEDS = "seeds_of_ranks_differ"


@mutant("two neighbouring seeds are one", part="device", check=SEEDS, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.seed")
    def seed(self: Any, usual: Any, seed: int) -> None:
        usual(seed // 2)


@mutant("a seed is kept as float32", part="device", check=SEEDS, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.seed")
    def seed(self: Any, usual: Any, seed: int) -> None:
        usual(int(torch.tensor(float(seed)).item()) % 2**63)


@mutant("a seed is a place in one run of numbers", part="device", check=SEEDS, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.seed")
    def seed(self: Any, usual: Any, seed: int) -> None:
        usual(7)
        torch.rand(seed % 1000, device=self.device)


# -- states ---------------------------------------------------------------------------------------

SAVED, ANOTHER, REFUSED = (
    "every_generator_is_saved",
    "state_serves_another",
    "wrong_states_are_refused",
)


@mutant("dropout has a generator of its own", part="device", check=SAVED, base="sim")
def _(on: Wrong) -> None:
    own = torch.Generator().manual_seed(5)

    @on.operation("native_dropout")
    def dropout(usual: Any, x: Any, rate: float, train: Any) -> Any:
        mask = (torch.rand(x.shape, generator=own) >= rate).to(x.device)
        return x * mask / (1 - rate), mask


@mutant("randperm has a generator of its own", part="device", check=SAVED, base="sim")
def _(on: Wrong) -> None:
    own = torch.Generator().manual_seed(5)

    @on.operation("randperm")
    def randperm(usual: Any, n: int, **kwargs: Any) -> Any:
        return torch.randperm(n, generator=own).to("sim")


@mutant("multinomial has a generator of its own", part="device", check=SAVED, base="sim")
def _(on: Wrong) -> None:
    own = torch.Generator().manual_seed(5)

    @on.operation("multinomial")
    def multinomial(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.multinomial(x.cpu(), *args, **{**kwargs, "generator": own}).to("sim")


@mutant("numbers are drawn in advance", part="device", check=SAVED, base="sim")
def _(on: Wrong) -> None:
    stock: list[Any] = []

    @on.operation("rand")
    def rand(usual: Any, sizes: Any, **kwargs: Any) -> Any:
        count = torch.Size(sizes).numel()
        while sum(each.numel() for each in stock) < count:
            stock.append(usual([4096], **kwargs))
        whole = torch.cat(stock)
        stock[:] = [whole[count:]]
        return whole[:count].reshape(sizes)


@mutant("dropout is drawn from the seed again each time", part="device", check=SAVED, base="sim")
def _(on: Wrong) -> None:
    @on.operation("native_dropout")
    def dropout(usual: Any, x: Any, rate: float, train: Any) -> Any:
        same = torch.Generator().manual_seed(torch.sim.initial_seed())
        mask = (torch.rand(x.shape, generator=same) >= rate).to(x.device)
        return x * mask / (1 - rate), mask


@mutant("the host's generator is not saved", part="device", check=SAVED, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.rng_state")
    def rng_state(self: Any, usual: Any) -> Any:
        return {"device": usual()["device"]}

    @on.method("placement.set_rng_state")
    def set_rng_state(self: Any, usual: Any, state: Any) -> None:
        usual({"host": torch.get_rng_state(), **state})


@mutant("states live in the object that gave them", part="device", check=ANOTHER, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.rng_state")
    def rng_state(self: Any, usual: Any) -> Any:
        self.states = [*getattr(self, "states", []), usual()]
        return {"number": torch.tensor([len(self.states) - 1], dtype=torch.uint8)}

    @on.method("placement.set_rng_state")
    def set_rng_state(self: Any, usual: Any, state: Any) -> None:
        states = getattr(self, "states", None)
        if states is not None:
            usual(states[int(state["number"])])


@mutant("a saved state changes with the next", part="device", check=ANOTHER, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.rng_state")
    def rng_state(self: Any, usual: Any) -> Any:
        found = usual()
        self.kept = getattr(self, "kept", found)
        for name, value in found.items():
            self.kept[name].copy_(value)
        return self.kept


@mutant("a state of the wrong size is filled up", part="device", check=REFUSED, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.set_rng_state")
    def set_rng_state(self: Any, usual: Any, state: Any) -> None:
        now = self.rng_state()
        for name, value in state.items():
            count = min(value.numel(), now[name].numel())
            now[name][:count] = value[:count]
        usual(now)


@mutant("a missing state is passed over", part="device", check=REFUSED, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.set_rng_state")
    def set_rng_state(self: Any, usual: Any, state: Any) -> None:
        usual({**self.rng_state(), **state})


@mutant("an error in a state is only printed", part="device", check=REFUSED)
def _(on: Wrong) -> None:
    @on.method("placement.set_rng_state")
    def set_rng_state(self: Any, usual: Any, state: Any) -> None:
        try:
            usual(state)
        except Exception as error:
            print(error)
