from pathlib import Path

import pytest

from common.config import Section, load_config
from common.errors import ConfigError


class Training(Section):
    steps: int = 4
    rate: float = 0.5


class Settings(Section):
    name: str
    training: Training = Training()


def load(**sources: object) -> Settings:
    return load_config(Settings, **sources)  # type: ignore[arg-type]


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('name = "file"\n[training]\nsteps = 1\nrate = 0.1\n')
    settings = load(
        defaults={"training": {"steps": 99}},
        file=file,
        environment={"HW__TRAINING__STEPS": "2", "OTHER": "x"},
        prefix="HW",
        flags={"name": "flag"},
        overrides=["training.steps=3"],
    )
    assert settings == Settings(name="flag", training=Training(steps=3, rate=0.1))
    assert load(defaults={"training": {"steps": 99}}, flags={"name": "x"}).training.steps == 99


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["name=x", "trainig.steps=3"], "unknown key 'trainig'; did you mean 'training'?"),
        (["name=x", "training.stepz=3"], "unknown key 'training.stepz'; did you mean 'steps'?"),
        (["name=x", "training.zzz=3"], "known keys: rate, steps"),
        ([], "name is missing"),
        (["name=x", "training.steps=many"], "training.steps = 'many'"),
        (["name"], "not key=value"),
        (["name=x", "name.more=1"], "not a section"),
    ],
)
def test_bad_settings_are_one_clear_line(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(overrides=overrides)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load(file=tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML"):
        load(file=tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UnicodeDecodeError"):
        load(file=tmp_path / "binary.toml")


def test_a_preset_is_not_changed_by_what_is_laid_over_it() -> None:
    preset = {"training": {"steps": 9}}
    load(defaults=preset, overrides=["name=x", "training.steps=1"])
    assert preset == {"training": {"steps": 9}}
