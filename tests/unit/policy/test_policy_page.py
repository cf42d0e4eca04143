"""docs/policy.md: its examples are policies, and it names what there is."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hatchway.domain.policy import compiled, rules, schema
from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.linting import lint
from hatchway.domain.policy.reading import load
from hatchway.domain.policy.verdicts import Verdict

NOW = 1_900_000_000.0
PAGE = (Path(__file__).parents[3] / "docs" / "policy.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_are_policies(text: str) -> None:
    document = load(text, NOW)
    compiled.compile_policy([TieredDocument(tier="project", name="example", document=document)])


def test_the_first_example_gives_nothing_to_say() -> None:
    assert lint([TieredDocument(tier="project", name="example", document=load(EXAMPLES[0], NOW))], NOW) == ()


def structures() -> list[Any]:
    return [
        kind
        for kind in vars(schema).values()
        if isinstance(kind, type) and issubclass(kind, schema.Base) and kind is not schema.Base
    ]


@pytest.mark.parametrize("kind", structures())
def test_every_key_and_every_choice_is_explained(kind: Any) -> None:
    words = set(re.findall(r"[\w.]+", " ".join(re.findall(r"`[^`\n]+`|```.*?```", PAGE, re.S))))
    for field in msgspec.structs.fields(kind):
        assert field.encode_name in words | {word.rpartition(".")[2] for word in words}, (
            f"{kind.__name__}.{field.encode_name}"
        )


def test_every_reason_is_explained_and_there_are_no_others() -> None:
    section = PAGE.split("\n## Verdicts\n")[1]
    named = {
        word
        for line in section.splitlines()
        if line.startswith("| `")
        for word in re.findall(r"`(\w+)`", line.split(" | ")[0])
    }
    said = next(field for field in msgspec.structs.fields(Verdict) if field.name == "reason")
    assert said.required
    source = Path(str(compiled.__file__)).read_text() + Path(str(rules.__file__)).read_text()
    given = set(
        re.findall(
            r'_deny\(\s*"(\w+)"|reason="(\w+)"|return "(\w+_\w+)"|else "(\w+_required)"|else "(dst_unbound)"', source
        )
    )
    made = {word for words in given for word in words if word} | {
        "no_rule",
        "allowed",
        "port_not_allowed",
        "private_denied",
        "platform_denied",
    }
    assert named == made
