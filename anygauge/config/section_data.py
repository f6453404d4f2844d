"""The section `data` of a run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from anygauge.config.paths import is_remote
from anygauge.config.sections import LARGEST, Positive, PositiveNumber, Section


class SourceSection(Section):
    """One set of rows and how to read them."""

    path: str = Field(
        description="A .json, .jsonl, .csv, .parquet or .txt file, the address of one (https://, "
        "hf://, s3://), or a dataset's name on the hub."
    )
    subset: str | None = Field(None, description="Hub: the dataset's configuration.")
    split: str = Field("train", description="Hub: the dataset's split.")
    revision: str | None = Field(None, description="Hub: branch, tag or commit.")
    format: Literal["auto", "prompt_completion", "alpaca", "messages", "sharegpt", "text"] = Field(
        "auto", description="How a row is laid out; auto: detected from path and columns."
    )
    prompt: str = Field("prompt", description="Column of the prompt (prompt_completion).")
    completion: str = Field("completion", description="Column of the answer (prompt_completion).")
    text: str = Field("text", description="Column of the text (format text).")
    messages: str = Field("messages", description="Column of the turns (messages).")
    conversations: str = Field("conversations", description="Column of the turns (sharegpt).")
    tools: str = Field("tools", description="Column of the tools, if a row has any (chats).")
    system: str = Field("system", description="Column of the system turn, if any (chats).")
    template: str = Field(
        "{prompt}\n",
        description="prompt_completion: what the model reads before the answer; {prompt} is "
        "replaced.",
    )
    limit: Positive | None = Field(None, description="Use only this many rows, from the beginning.")
    weight: PositiveNumber = Field(
        1.0,
        description="Times that each row is read in an epoch: 2 is twice, 0.5 every second epoch.",
    )


class DataSection(Section):
    """Rows to train and evaluate on, and how they become tokens."""

    train: SourceSection | list[SourceSection] = Field(
        description="Rows to train on: one source, or a list of them."
    )
    eval: SourceSection | list[SourceSection] | None = Field(
        None, description="Rows to evaluate on."
    )
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of the training rows to hold out for evaluation, in place of eval."
    )
    chat_template: str | None = Field(
        None, description="Jinja file (or the template itself) for chats; null: the tokenizer's."
    )
    max_length: Annotated[int, Field(ge=2, le=LARGEST)] = Field(
        512, description="Most tokens in a row or pack."
    )
    too_long: Literal["truncate", "drop"] = Field(
        "truncate", description="What becomes of rows beyond max_length."
    )
    loss_on: Literal["answer", "last_turn", "all"] = Field(
        "answer",
        description="Tokens that enter the loss: answers (in a chat, every turn of the assistant), "
        "only the last turn of the assistant, or every token.",
    )
    packing: bool = Field(
        False, description="Put several rows in one sequence; none attends to another."
    )
    group_by_length: bool = Field(
        False, description="Put rows of like length in one step, so that less is padding."
    )
    streaming: bool = Field(
        False,
        description="Tokenise rows during training instead of before it; remote rows are then "
        "read over the network, without a copy on disk.",
    )
    shuffle_buffer: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        10_000,
        description="With streaming: remote rows are shuffled within blocks of this many rows.",
    )
    cache: str | None = Field(
        None,
        description="Folder for tokenised rows; null: $ANYGAUGE_CACHE, or ~/.cache/anygauge; off: "
        "tokenise anew in each run.",
    )

    @field_validator("cache", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        # YAML reads a bare `off` as false.
        return "off" if value is False else value

    @property
    def train_sources(self) -> tuple[SourceSection, ...]:
        """The training sources, also where there is but one."""
        return _listed(self.train)

    @property
    def eval_sources(self) -> tuple[SourceSection, ...]:
        """The evaluation sources; empty where there are none."""
        return _listed(self.eval)

    @model_validator(mode="after")
    def _checked(self) -> DataSection:
        if self.train == [] or self.eval == []:
            raise ValueError("an empty list has no rows; give at least one source")
        if self.eval is not None and self.eval_fraction:
            raise ValueError("give 'eval' or 'eval_fraction', not both")
        if any(source.weight != 1 for source in self.eval_sources):
            raise ValueError("'weight' is of no use in 'eval', where each row is read once")
        if self.streaming:
            self._check_streamed()
        if self.streaming and self.group_by_length:
            raise ValueError(
                "give 'streaming' or 'group_by_length', not both: lengths are known only once rows "
                "are tokenised"
            )
        if self.packing and self.group_by_length:
            raise ValueError(
                "give 'packing' or 'group_by_length', not both: packs have no padding to save"
            )
        return self

    def _check_streamed(self) -> None:
        """What cannot be done with rows that arrive in their own order."""
        remote = [source for source in self.train_sources if is_remote(source.path)]
        why = " is streamed and arrives in its own order"
        way_out = "; leave 'streaming' out (rows are then downloaded)"
        if remote and len(self.train_sources) > 1:
            raise ValueError(
                f"{remote[0].path}{why}, so it cannot be mixed with other sources of 'train'"
                f"{way_out}, or make it the only source"
            )
        if remote and remote[0].weight != 1:
            raise ValueError(
                f"{remote[0].path}{why}, so it cannot have a 'weight'{way_out}, or change "
                "train.epochs instead"
            )
        if remote and self.eval_fraction:
            raise ValueError(
                f"{remote[0].path}{why}, so the rows of 'eval_fraction' cannot be drawn from all "
                f"of it{way_out}, or give 'eval' a source of its own, with a 'limit'"
            )
        for source in self.eval_sources:
            if is_remote(source.path) and source.limit is None:
                raise ValueError(
                    f"{source.path} in 'eval' needs a 'limit' when 'streaming' is on, because "
                    "rows of 'eval' are always tokenised before the run"
                )


def _listed(
    sources: SourceSection | list[SourceSection] | None,
) -> tuple[SourceSection, ...]:
    if sources is None:
        return ()
    return (sources,) if isinstance(sources, SourceSection) else tuple(sources)
