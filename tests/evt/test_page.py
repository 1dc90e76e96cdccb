"""docs/visitor_trees.md: its blocks are one program, its texts what that prints, its lists complete."""

import inspect
import re
from pathlib import Path

from epifuse.forms.evt import fusion
from tests.test_docs import output_of

PAGE = Path(__file__).parents[2] / "docs" / "visitor_trees.md"


def test_the_page_shows_what_its_program_prints(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    shown = "".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL))
    assert output_of(program, tmp_path) == shown


def test_the_page_lists_every_fusion_with_its_formula() -> None:
    page = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    made = {name: value for name, value in vars(fusion).items() if getattr(value, "__module__", "") == fusion.__name__}
    public = [(name, str(inspect.getdoc(value)).splitlines()[0]) for name, value in made.items() if name[0].isupper()]
    assert public
    assert found == public
