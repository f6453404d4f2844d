"""One kernel for each operation: asked for, preferred, default or the reference."""

from __future__ import annotations

import pytest

from anygauge.interface import Backend, NotAvailableError, PluginError
from anygauge.kernels.choose import choose_kernels, load_kernel


class BareBackend(Backend):
    name = "plain"
    device_type = "meta"


class Fussy(BareBackend):
    name = "fussy"
    kernels = {"softmax": "fast"}


@pytest.fixture
def kernels(install, load):
    """``kernels("name='fast', default=True", ...)`` gives a registry with softmax kernels."""

    def put(*specs, plugin="kernels", source_too=""):
        listed = ",\n".join(
            f"KernelSpec(**{{'operation': 'softmax', 'factory': 'fake_{plugin}:make', "
            f"'api_version': API_VERSION, **dict({spec})}})"
            for spec in specs
        )
        source = f"""\
from anygauge.interface import hookimpl, API_VERSION, KernelSpec

def make():
    return "the kernel"

@hookimpl
def anygauge_provide_kernels():
    return [{listed}]

{source_too}
"""
        install(f"{plugin}-dist", "1.0", {plugin: f"fake_{plugin}"}, **{f"fake_{plugin}": source})
        registry = load()
        assert not registry.failures
        return registry

    return put


META = "device_types=frozenset({'meta'})"
ELSEWHERE = "device_types=frozenset({'elsewhere'})"


def test_nothing_installed_gives_the_reference(load):
    assert choose_kernels(load(), BareBackend(), {}) == {}
    choice = choose_kernels(load(), Fussy(), {})["softmax"]
    assert (choice.name, choice.provided) == ("reference", None)
    assert choice.rejected == (
        ("fast", "preferred by the fussy backend, but no installed plugin provides it"),
    )
    assert load_kernel({"softmax": choice}, "softmax") is None
    assert load_kernel({}, "softmax") is None


OF_ANOTHER = f"name='far', default=True, {ELSEWHERE}"


@pytest.mark.parametrize(
    ("specs", "backend", "chosen", "rejected"),
    [
        (["name='fast'", "name='usual', default=True"], Fussy, "fast", ()),
        (["name='fast'", "name='usual', default=True"], BareBackend, "usual", ()),
        (
            ["name='fast', missing=lambda: 'no compiler'", "name='usual', default=True"],
            Fussy,
            "usual",
            (("fast", "preferred by the fussy backend, but no compiler"),),
        ),
        (
            ["name='all', default=True", f"name='ours', default=True, {META}"],
            BareBackend,
            "ours",
            (),
        ),
        ([OF_ANOTHER, "name='reference'"], BareBackend, "reference", ()),
    ],
    ids=["preferred", "default", "preferred cannot run", "made for the device", "for another"],
)
def test_without_a_request_one_is_chosen(kernels, specs, backend, chosen, rejected):
    choice = choose_kernels(kernels(*specs), backend(), {})["softmax"]
    assert (choice.name, choice.rejected) == (chosen, rejected)
    assert load_kernel({"softmax": choice}, "softmax") == "the kernel"


def test_requested_wins_and_is_recorded(kernels):
    registry = kernels("name='fast'", "name='usual', default=True")
    choice = choose_kernels(registry, Fussy(), {"softmax": "usual"})["softmax"]
    assert choice.record() == {
        "operation": "softmax",
        "name": "usual",
        "reason": "asked for by name",
        "distribution": "kernels-dist",
        "version": "1.0",
        "rejected": [],
    }
    assert choose_kernels(registry, Fussy(), {"softmax": "reference"})["softmax"].name == (
        "reference"
    )


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (f"name='fast', {ELSEWHERE}", "it serves elsewhere devices, not 'meta'"),
        ("name='fast', missing=lambda: 'no compiler'", "no compiler"),
        ("name='fast', missing=lambda: 1 / 0", "its check raised ZeroDivisionError"),
    ],
)
def test_requested_that_cannot_run_is_refused(kernels, spec, reason):
    registry = kernels(spec, "name='usual'")
    with pytest.raises(NotAvailableError) as caught:
        choose_kernels(registry, BareBackend(), {"softmax": "fast"})
    assert reason in str(caught.value)
    assert "kernels-dist 1.0" in str(caught.value)
    assert "those that can: reference, usual" in str(caught.value)


def test_unknown_kernel_and_unknown_operation(kernels):
    registry = kernels("name='fast'")
    with pytest.raises(PluginError, match=r"did you mean 'fast'\? valid names: fast, reference"):
        choose_kernels(registry, BareBackend(), {"softmax": "fats"})
    with pytest.raises(PluginError, match=r"no operation 'sofmax'; did you mean 'softmax'\?"):
        choose_kernels(registry, BareBackend(), {"sofmax": "fast"})


def test_kernel_claimed_twice(kernels):
    kernels("name='fast', default=True")
    registry = kernels("name='fast', default=True", plugin="rivals")
    choice = choose_kernels(registry, BareBackend(), {})["softmax"]
    assert choice.name == "reference"
    assert "rivals-dist 1.0" in dict(choice.rejected)["fast"]
    with pytest.raises(PluginError, match=r"kernels-dist 1.0 .* rivals-dist 1.0"):
        choose_kernels(registry, BareBackend(), {"softmax": "fast"})


def test_choosing_imports_no_kernel(kernels):
    registry = kernels("name='fast', factory='fake_nowhere:make'")
    choice = choose_kernels(registry, BareBackend(), {"softmax": "fast"})["softmax"]
    with pytest.raises(PluginError, match="fake_nowhere"):
        load_kernel({"softmax": choice}, "softmax")


def test_a_kernel_is_made_with_the_run_s_choice_of_what_it_uses(kernels):
    registry = kernels(
        "name='fast'",
        "name='usual', default=True",
        "operation='attention', name='around', uses=('softmax',), factory='fake_kernels:around'",
        source_too="def around(softmax):\n    return f'around {softmax}'\n",
    )
    choices = choose_kernels(registry, BareBackend(), {"attention": "around"})
    assert load_kernel(choices, "attention") == "around the kernel"
    with pytest.raises(PluginError, match=r"'around' .* is made with 'softmax', which no plugin"):
        load_kernel({"attention": choices["attention"]}, "attention")
