"""A folder of the package imports only from those to its left."""

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
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_imported(path: Path) -> set[str]:
    found = re.findall(r"^ *from (\.+)(\w*)[\w.]* import (\w+)", path.read_text(), re.MULTILINE)
    depth = len(path.relative_to(PACKAGE).parts)
    rooms = {module or name for dots, module, name in found if len(dots) == depth}
    return {room if room in FLOOR else "__init__" for room in rooms}


def test_imports_point_to_the_left():
    paths = sorted(PACKAGE.rglob("*.py"))
    assert {room_of(path) for path in paths} <= FLOOR.keys()
    for path in paths:
        to_the_right = [x for x in rooms_imported(path) - {room_of(path)} if FLOOR[x] >= FLOOR[room_of(path)]]
        assert to_the_right == [], path
