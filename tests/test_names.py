"""Our top-level folders are import names: nothing else in the environment may bear them."""

import importlib.metadata

from tests.test_floor_plan import MAY_IMPORT


def test_no_installed_package_bears_the_name_of_a_folder() -> None:
    owners = importlib.metadata.packages_distributions()
    taken = {
        name: owners[name]
        for name in MAY_IMPORT
        if set(owners.get(name, ["kvferry"])) != {"kvferry"}
    }
    assert not taken, f"uninstall {taken}: they and this repository would shadow each other"


def test_the_project_is_installed_under_its_own_name() -> None:
    assert importlib.metadata.version("kvferry") == "0.1.0"
