"""A YAML file of settings: flag names (with - or _, aliases too) or nested sections, each with its line.

max-num-seqs: 64            # the flag's name
context_length: 32k         # another server's name for it
cache: {block_size: 32}     # or the settings' own sections
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from headrace.engine.config.flag import Given
from headrace.engine.config.flags import FLAGS
from headrace.engine.config.names import (
    all_spellings,
    nearest,
    normalise,
    setting_paths,
    unknown_name,
)

_BY_PATH = {flag.path: flag for flag in FLAGS}


def read_yaml(file: Path) -> list[Given]:
    """Every setting of the file in order. ValueError, one sentence with file and line, for anything unknown."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}" if mark else ""
        raise ValueError(f"{file}{at}: not valid YAML ({_problem(error)})") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{file}: expected names and values, like 'max-num-seqs: 64'")
    paths = setting_paths()
    sections = {path.partition(".")[0] for path in paths}
    rows: list[Given] = []
    for name, node, line in _entries(root, f"{file}"):
        where = f"{file}:{line}"
        if name in sections and isinstance(node, yaml.MappingNode):
            rows += _section(name, node, file, paths)
        else:
            rows.append(_flag(name, _value(node, where), where))
    _refuse_twice(rows)
    return rows


def _section(
    section: str, node: yaml.MappingNode, file: Path, paths: Sequence[str]
) -> Iterator[Given]:
    fields = [path.partition(".")[2] for path in paths if path.startswith(section + ".")]
    for name, child, line in _entries(node, f"{file}"):
        field = name.replace("-", "_")
        where = f"{file}:{line}"
        flag = _BY_PATH.get(f"{section}.{field}")
        if flag is None:
            guess = nearest(field, fields)
            hint = f"; did you mean {guess}?" if guess else f"; it has {', '.join(fields)}"
            raise ValueError(f"{where}: {section} has no setting {name}{hint}")
        yield Given(flag, _value(child, where), f"file {where} {section}.{field}")


def _flag(name: str, value: Any, where: str) -> Given:
    known = all_spellings()
    typed = name if name.startswith("-") else f"--{name}"
    spelling = known.get(normalise(typed)) or known.get(f"-{name}")
    if spelling is None:
        text = (
            unknown_name(typed, known).replace("option --", "setting ").replace("mean --", "mean ")
        )
        raise ValueError(f"{where}: {text}")
    if spelling.negative:
        if not isinstance(value, bool):
            raise ValueError(f"{where}: {name}: expected true or false, got {value!r}")
        value = not value
    return Given(spelling.flag, value, f"file {where} {name}")


def _entries(node: yaml.MappingNode, file: str) -> Iterator[tuple[str, yaml.Node, int]]:
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"{file}:{line}: a name must be plain text")
        yield key.value, value, line


def _value(node: yaml.Node, where: str) -> Any:
    """The node as plain data; sizes such as 010 or 1_000 keep YAML's own meaning."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not valid YAML ({_problem(error)})") from None
    finally:
        loader.dispose()


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or str(error).partition("\n")[0])


def _refuse_twice(rows: Sequence[Given]) -> None:
    seen: dict[str, Given] = {}
    for row in rows:
        first = seen.setdefault(row.flag.path, row)
        if first is not row:
            raise ValueError(f"{row.source}: set already by {first.source}; keep one of the two")
