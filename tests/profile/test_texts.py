"""Values in Python, JSON and YAML files, read and changed; everything else stays as it is."""

from __future__ import annotations

import json

import pytest

from memtop.supervisor.profile import config_text, python_source
from memtop.supervisor.profile.config_text import ConfigTextError

CONFIG = '''\
"""Settings. batch_size = 99"""
from dataclasses import dataclass, field

# 批量 batch_size = 1
batch_size = 5 * 8  # 微批
text = "é"; later = 3  # é


@dataclass
class Train:
    batch_size: int = 16   # of one GPU
    accumulation: int = field(
        default=8,  # micro-batches
    )
    unknown: int = compute()


class Other:
    batch_size: int = 2
'''


@pytest.mark.parametrize(
    ("name", "value", "old", "new"),
    [
        ("batch_size", 40, "batch_size = 5 * 8  # 微批", "batch_size = 4  # 微批"),
        ("Train.batch_size", 16, "batch_size: int = 16   # of", "batch_size: int = 4   # of"),
        ("Train.accumulation", 8, "default=8,  # micro", "default=4,  # micro"),
        ("later", 3, 'text = "é"; later = 3  # é', 'text = "é"; later = 4  # é'),
    ],
)
def test_a_variable_of_a_module_or_a_class(name: str, value: int, old: str, new: str) -> None:
    tree = python_source.tree_of(CONFIG)
    assert tree is not None
    assert python_source.variable(tree, name) == value
    assert python_source.with_variable(CONFIG, name, "4") == CONFIG.replace(old, new)


def test_a_variable_that_is_not_there_or_is_computed() -> None:
    tree = python_source.tree_of(CONFIG)
    assert tree is not None
    assert python_source.variable(tree, "Train.unknown") is None
    assert python_source.variable(tree, "missing") is None
    assert python_source.with_variable(CONFIG, "Missing.batch_size", "4") is None
    assert python_source.with_variable("this is no Python", "a", "4") is None
    assert python_source.tree_of("x = \0") is None


def test_windows_lines_stay() -> None:
    assert python_source.with_variable("a = 1\r\nb = 2\r\n", "b", "3") == "a = 1\r\nb = 3\r\n"


def test_options_and_imports_of_a_script() -> None:
    tree = python_source.tree_of(
        "import torch.nn as nn\nfrom transformers import Trainer\n"
        "def f(p):\n    p.add_argument('--n', '--number', type=int, default=3 * 4)\n    p.add_argument('--flag')\n"
    )
    assert tree is not None
    assert python_source.option_default(tree, ("--number",)) == 12
    assert python_source.option_default(tree, ("--flag",)) is None
    assert {"torch", "torch.nn", "transformers", "transformers.Trainer"} == python_source.imports_of(tree)
    assert python_source.declared(tree, ("--m", "--flag")) == "--flag"


YAML = """\
# batch_size: 1
model:
  batch_size: 3   # of the model
  list:
    - batch_size: 7
batch_size: 8 # 批
data:
  "batch_size": 5
  flow: {a: 1}
  name: 'two words'
"""


@pytest.mark.parametrize(
    ("key", "value", "old", "new"),
    [
        ("batch_size", 8, "\nbatch_size: 8 # 批", "\nbatch_size: 4 # 批"),
        ("model.batch_size", 3, "batch_size: 3   # of", "batch_size: 4   # of"),
        ("data.batch_size", 5, '"batch_size": 5', '"batch_size": 4'),
    ],
)
def test_a_key_of_a_yaml_file(key: str, value: int, old: str, new: str) -> None:
    assert config_text.value_in(YAML, "yaml", key) == value
    assert config_text.with_value(YAML, "yaml", key, 4) == YAML.replace(old, new)


def test_what_a_yaml_file_does_not_have_as_a_plain_value() -> None:
    assert config_text.value_in(YAML, "yaml", "data.name") == "two words"
    assert config_text.value_in(YAML, "yaml", "data.flow") is None
    assert not config_text.has_key(YAML, "yaml", "data.flow.a")
    with pytest.raises(ConfigTextError, match=r"data\.flow is no plain number"):
        config_text.with_value(YAML, "yaml", "data.flow", 4)
    with pytest.raises(ConfigTextError, match=r"it has no line for optimizer\.lr"):
        config_text.with_value(YAML, "yaml", "optimizer.lr", 4)


def test_a_key_of_a_json_file() -> None:
    text = '{"a": {"b": 2, "c": [1]}, "d": "auto"}'
    assert config_text.value_in(text, "json", "a.b") == 2
    assert json.loads(config_text.with_value(text, "json", "a.b", 4)) == {"a": {"b": 4, "c": [1]}, "d": "auto"}
    assert json.loads(config_text.with_value(text, "json", "a.new", 4))["a"]["new"] == 4
    with pytest.raises(ConfigTextError, match="it has no object d"):
        config_text.with_value(text, "json", "d.e", 4)
    with pytest.raises(ConfigTextError, match="it is not JSON"):
        config_text.with_value("{", "json", "a", 4)
    assert not config_text.has_key("{", "json", "a")
