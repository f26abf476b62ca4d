import io
import zipfile

from gimbal_jax.serving.rpc.model_files import load_model_files
from tests.serving.fake_server import write_model_folder


def test_folder_with_tokenizer_gives_archive_and_defaults(tmp_path):
    folder = tmp_path / "tiny-moe"
    folder.mkdir()
    write_model_folder(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    files = load_model_files(folder)
    assert (files.name, files.sampling_defaults) == ("tiny-moe", {"temperature": 0.6, "top_k": 20})
    assert files.tokenizer is not None
    with zipfile.ZipFile(io.BytesIO(files.archive)) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    assert set(contents) == {"tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"}
    assert contents["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert load_model_files(folder, "other").name == "other"


def test_archive_does_not_depend_on_dates(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        write_model_folder(folder)
    for path in second.iterdir():
        path.touch()
    assert load_model_files(first).archive == load_model_files(second).archive


def test_folder_without_tokenizer_gives_an_empty_archive(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    files = load_model_files(tmp_path)
    assert (files.tokenizer, files.archive, files.sampling_defaults) == (None, b"", {})
