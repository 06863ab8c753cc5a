"""The image that the manifests name can be built from what is here: what holds without Docker."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
DOCKERFILE = (K8S / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
PACKAGES = {name.removesuffix("*") for name in SETUPTOOLS["packages"]["find"]["include"]}


def instructions(name: str) -> list[list[str]]:
    """The words of each instruction of that name, its continued lines joined."""
    whole = DOCKERFILE.replace("\\\n", " ")
    return [line.split()[1:] for line in whole.splitlines() if line.startswith(f"{name} ")]


def copied() -> set[str]:
    """What is copied from the repository."""
    given = [words for words in instructions("COPY") if not words[0].startswith("--from")]
    return {path for words in given for path in words[:-1]}


def pods() -> list[dict[str, Any]]:
    """The pods that run this image."""
    found = []
    for path in sorted((K8S / "base").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            pod = document.get("spec", {}).get("template", {}).get("spec", {})
            found += (
                [pod] if any(c["image"] == "kvferry" for c in pod.get("containers", ())) else []
            )
    return found


def test_every_path_that_is_copied_exists_and_is_sent_to_the_builder() -> None:
    assert all((ROOT / path).exists() for path in copied())
    ignored = (K8S / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied()


def test_every_package_is_copied_and_whatever_lies_in_one_is_installed_with_it() -> None:
    assert copied() >= PACKAGES
    installed = ["*.py", *SETUPTOOLS["package-data"]["*"]]
    for package in PACKAGES:
        files = [each for each in (ROOT / package).rglob("*") if each.is_file()]
        files = [each for each in files if "__pycache__" not in each.parts]
        left = [each for each in files if not any(fnmatch(each.name, kind) for kind in installed)]
        assert not left, f"not in an installation: {left}"


def test_its_python_is_one_that_the_project_takes_and_every_package_is_pinned() -> None:
    (python,) = (words[0] for words in instructions("ARG") if words[0].startswith("PYTHON="))
    least = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert python == f"PYTHON={least}"  # the one that constraints.txt was tried with
    assert all(words[0].startswith("python:${PYTHON}-") for words in instructions("FROM"))
    installs = re.findall(r"pip install .*", DOCKERFILE)
    assert len(installs) == 3
    assert all(line.startswith("pip install -c constraints.txt ") for line in installs)


def test_pods_run_commands_that_it_has_as_the_user_that_it_has() -> None:
    assert len(pods()) == 3
    (user,) = instructions("USER")
    (entry,) = instructions("ENTRYPOINT")
    scripts = set(PROJECT["project"]["scripts"])
    assert entry == ['["kvferry"]'] and "kvferry" in scripts
    for pod in pods():
        assert user == [f"{pod['securityContext']['runAsUser']}:10001"]
        assert {c["command"][0] for c in pod["containers"]} <= scripts
        mounts = {mount["mountPath"] for c in pod["containers"] for mount in c["volumeMounts"]}
        assert "/tmp" in mounts  # the only place that it writes to


def test_the_tag_to_build_is_the_one_that_pods_ask_for() -> None:
    (image,) = yaml.safe_load((K8S / "base" / "kustomization.yaml").read_text())["images"]
    tag = f"-t {image['name']}:{image['newTag']} "
    assert tag in DOCKERFILE
    assert tag in (K8S / "README.md").read_text()
    assert image["newTag"] == PROJECT["project"]["version"]
