"""A folder of the package imports only from those to its left, and all of them by relative imports."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ppo_parts"
FLOORS = [
    {"functional"},
    {"_base"},
    {"distributions"},
    {"_core"},
    {"_parts", "envs"},
    {"errors", "tokens", "exploration", "critics", "regularizers", "symmetry", "agents", "optim"},
    {"__init__"},
    {"networks", "testing", "bridges"},
    {"training"},
    {"commands"},
    {"evaluate", "watch", "compare", "export", "doctor", "recipes"},
]
DOCSTRING = re.compile(r'^ *""".*?"""', re.MULTILINE | re.DOTALL)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_imported(path: Path) -> set[str]:
    found = re.findall(r"^ *from (\.+)(\w*)[\w.]* import (\w+)", path.read_text(), re.MULTILINE)
    depth = len(path.relative_to(PACKAGE).parts)
    rooms = {module or name for dots, module, name in found if len(dots) == depth}
    return {room if room in FLOOR else "__init__" for room in rooms}


def test_imports_point_to_the_left():
    recipes = {*PACKAGE.glob("recipes/**/*.py")}  # programs, which can be copied out
    paths = sorted(PACKAGE.rglob("*.py"))
    assert {room_of(path) for path in paths} <= FLOOR.keys()
    for path in paths:
        to_the_right = [x for x in rooms_imported(path) - {room_of(path)} if FLOOR[x] >= FLOOR[room_of(path)]]
        assert to_the_right == [], path
        names = re.findall(r"^ *(?:from|import) +(ppo_parts)\b", DOCSTRING.sub("", path.read_text()), re.MULTILINE)
        assert path in recipes or names == [], path
