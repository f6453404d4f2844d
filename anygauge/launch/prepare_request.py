"""The request to the prepare process, and its answer."""

from __future__ import annotations

from typing import Any, Literal

from anygauge.config.paths import is_remote
from anygauge.config.resolved import parse_run
from anygauge.config.schema import ModelSection
from anygauge.data.formats import Chat
from anygauge.launch.decision import Decision
from anygauge.models.hub import DownloadRequest
from anygauge.training.checks import Findings
from anygauge.util.section import Count, Section


class PrepareRequest(Section):
    """A request: what the process fetches, and the stages that it runs, in this order.

    Attributes:
        fetch: what is brought from the hub.
        copies: addresses of rows that are copied into the cache (`anygauge.data.addresses`).
        fetched: that is done.
        unreachable_refuses: a hub that does not answer is a refusal, not a fact of the answer.
        stages: others than ``fetch``, as `Stages` has them.
        run: as `run_json` gives it, without its variables, which this process has.
        backend: name of the chosen one.
        id: of this start; see `anygauge.data.prepare_rows`.
        has_files: this machine has the files that the run file names.
        engine: also tell the engine's settings and the run's steps, for a dry run.
        forms: which of `anygauge.training.auto.forms_of` the run may be, if not the one it names.
        cards: what this machine's devices are called; None: nobody has looked yet.
        asked: True: plan also where that is not needed; False: never.
        force: refuse nothing because of a plan.
        first: put so many rows of each source in the cache; None: all.
        model, chat_template, chat_template_kwargs, chats: what is rendered. Without chats, only
            the tokens that end an answer are asked for, of which there are none without a template.
        with_torch: hide nothing.
    """

    fetch: tuple[DownloadRequest, ...] = ()
    copies: tuple[str, ...] = ()
    fetched: bool = False
    unreachable_refuses: bool = True
    stages: tuple[Literal["check", "plan", "rows", "render"], ...] = ()
    run: str = ""
    backend: str = ""
    id: str = ""
    has_files: bool = True
    engine: bool = False
    forms: tuple[Count, ...] = ()
    cards: tuple[str, ...] | None = None
    asked: bool | None = None
    force: bool = False
    first: int | None = None
    model: ModelSection | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    chats: tuple[Chat, ...] = ()
    with_torch: bool = False

    @property
    def has_network(self) -> bool:
        """Whether its next stage may use it: a fetch, or the rows of a stream."""
        if self.needs_fetch or "rows" not in self.stages:
            return self.needs_fetch
        data = parse_run(self.run).data
        every = {each.path for each in (*data.train_sources, *data.eval_sources)}
        return any(map(is_remote, every - {*self.copies}))

    @property
    def needs_fetch(self) -> bool:
        """Whether something is still to be fetched."""
        return not self.fetched and bool(self.fetch or self.copies)


class PrepareAnswer(Section):
    """The result of a request.

    Attributes:
        left: bytes of weights whose index alone was wanted, and that are not here.
        unreachable: why the hub could not be asked, if that refuses nothing.
        unchecked: why nothing could be checked here, and only ranks will.
        ids: the tokens of each chat.
        stop_ids: the tokens that end an answer.
    """

    left: int = 0
    unreachable: str = ""
    unchecked: str = ""
    found: Findings = Findings()
    decided: Decision | None = None
    ids: list[list[int]] = []
    stop_ids: list[int] = []
