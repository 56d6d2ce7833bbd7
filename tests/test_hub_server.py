"""The test Hub behaves, towards the real huggingface_hub client, as the real one does."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer
from huggingface_hub import HfApi, get_session, hf_hub_download, upload_folder
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, HTTPError, RepositoryNotFoundError

REPO = "user/grown"
# The client itself uploads LFS files in a way that its HTTP library deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.redirect_client(monkeypatch)
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "extra").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\ntags: [grown]\n---\n# A model\n", encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (folder / "extra" / "empty.txt").touch()
    (folder / "model.safetensors").write_bytes(os.urandom(300_000))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def create_and_upload(folder: Path, token: str | None = None, message: str | None = None) -> None:
    api = HfApi(token=token)
    api.create_repo(REPO, exist_ok=True)
    api.upload_folder(repo_id=REPO, folder_path=folder, commit_message=message)


def test_uploaded_bytes_arrive_equal(hub: HubServer, folder: Path) -> None:
    create_and_upload(folder, message="Grow")
    assert hub.repos[REPO].files == contents(folder)
    assert [commit.message for commit in hub.repos[REPO].commits] == ["Grow"]
    assert hub.requests.count("lfs_put") == hub.requests.count("lfs_verify") == 1


def test_an_endpoint_argument_or_the_module_functions_reach_it_too(hub: HubServer, folder: Path) -> None:
    api = HfApi(endpoint=hub.url, token=hub.token)
    assert api.whoami()["name"] == "user"
    assert api.create_repo("grown").repo_id == REPO
    upload_folder(repo_id=REPO, folder_path=folder)
    assert hub.repos[REPO].files == contents(folder)


def test_a_second_upload_replaces_what_changed_and_keeps_the_rest(hub: HubServer, folder: Path) -> None:
    create_and_upload(folder)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    create_and_upload(folder)
    assert hub.repos[REPO].files == contents(folder)
    assert len(hub.repos[REPO].commits) == 2
    assert hub.requests.count("lfs_put") == 1


def test_an_unchanged_folder_makes_no_commit(hub: HubServer, folder: Path) -> None:
    create_and_upload(folder)
    create_and_upload(folder)
    assert len(hub.repos[REPO].commits) == 1


def test_a_repo_that_exists_is_an_error_unless_allowed(hub: HubServer) -> None:
    HfApi().create_repo(REPO)
    with pytest.raises(HfHubHTTPError, match="already created"):
        HfApi().create_repo(REPO)
    assert HfApi().create_repo(REPO, exist_ok=True).repo_id == REPO


def test_a_foreign_namespace_is_forbidden(hub: HubServer) -> None:
    with pytest.raises(HfHubHTTPError, match="don't have the rights"):
        HfApi().create_repo("someone/else", exist_ok=True)
    assert hub.repos == {}


def test_a_wrong_token_is_refused_and_creates_nothing(hub: HubServer, folder: Path) -> None:
    with pytest.raises(HfHubHTTPError, match="Invalid credentials") as caught:
        create_and_upload(folder, token="hf_wrong")
    assert caught.value.response.status_code == 401
    assert hub.repos == {}


def test_a_wrong_token_commits_nothing_to_an_existing_repo(hub: HubServer, folder: Path) -> None:
    HfApi().create_repo(REPO)
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        HfApi(token="hf_wrong").upload_folder(repo_id=REPO, folder_path=folder)
    assert hub.repos[REPO].commits == []
    assert "commit" not in hub.requests


def test_a_connection_dropped_during_the_lfs_put_commits_nothing(hub: HubServer, folder: Path) -> None:
    hub.drop_connection_on("lfs_put")
    with pytest.raises(RuntimeError, match=r"model\.safetensors") as caught:
        create_and_upload(folder)
    assert isinstance(caught.value.__cause__, HTTPError)
    assert hub.repos[REPO].commits == [] and hub.repos[REPO].lfs_objects == {}
    assert "commit" not in hub.requests


def test_a_connection_dropped_during_the_commit_commits_nothing(hub: HubServer, folder: Path) -> None:
    hub.drop_connection_on("commit")
    with pytest.raises(HTTPError) as caught:
        create_and_upload(folder)
    assert not isinstance(caught.value, HfHubHTTPError)
    assert hub.repos[REPO].commits == []
    assert hub.requests.count("commit") == 1


def test_an_upload_can_be_repeated_after_a_drop(hub: HubServer, folder: Path) -> None:
    hub.drop_connection_on(lambda method, path: method == "POST" and "/commit/" in path, times=1)
    with pytest.raises(HTTPError):
        create_and_upload(folder)
    create_and_upload(folder)
    assert hub.repos[REPO].files == contents(folder)


def test_the_client_survives_one_drop_when_it_may_retry(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.redirect_client(monkeypatch, max_retries=1)
    hub.drop_connection_on("lfs_put", times=1)
    create_and_upload(folder)
    assert hub.requests.count("lfs_put") == 2
    assert hub.repos[REPO].files == contents(folder)


def test_an_unknown_route_to_drop_is_refused(hub: HubServer) -> None:
    with pytest.raises(ValueError, match="Known: whoami"):
        hub.drop_connection_on("lfs_upload")


def test_the_private_flag_is_kept_and_hides_the_repo(hub: HubServer) -> None:
    HfApi().create_repo(REPO, private=True)
    HfApi().create_repo("user/open", private=False)
    assert hub.repos[REPO].private and not hub.repos["user/open"].private
    assert HfApi().model_info(REPO).private
    assert not HfApi().model_info("user/open", token=False).private
    with pytest.raises(RepositoryNotFoundError):
        HfApi().model_info(REPO, token=False)


def test_a_card_with_broken_metadata_is_refused_before_any_upload(hub: HubServer, folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: [mit\n---\n", encoding="utf-8")
    with pytest.raises(ValueError, match="YAML metadata error"):
        create_and_upload(folder)
    assert "preupload" not in hub.requests


def test_a_commit_of_an_lfs_object_never_uploaded_is_refused(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub._commit_api._upload_lfs_files", lambda **kwargs: None)
    with pytest.raises(BadRequestError, match=r"model\.safetensors"):
        create_and_upload(folder)
    assert hub.repos[REPO].commits == []


def test_lfs_content_with_another_hash_is_refused(hub: HubServer) -> None:
    HfApi().create_repo(REPO)
    answer = get_session().put(f"{hub.url}/lfs-storage/{REPO}/{'0' * 64}", content=b"something else")
    assert answer.status_code == 400
    assert hub.repos[REPO].lfs_objects == {}


def test_downloading_gives_the_same_bytes(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    create_and_upload(folder)
    copy = HfApi().snapshot_download(REPO, local_dir=tmp_path / "copy")
    assert contents(Path(copy)) == contents(folder)
    weights = hf_hub_download(REPO, "model.safetensors", cache_dir=tmp_path / "cache")
    assert Path(weights).read_bytes() == contents(folder)["model.safetensors"]
    assert sorted(HfApi().list_repo_files(REPO)) == sorted(contents(folder))


def test_an_old_revision_can_still_be_downloaded(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    create_and_upload(folder)
    before = contents(folder)["config.json"]
    (folder / "config.json").write_text("{}", encoding="utf-8")
    create_and_upload(folder)
    first = hub.repos[REPO].commits[0].oid
    config = hf_hub_download(REPO, "config.json", revision=first, cache_dir=tmp_path / "cache")
    assert Path(config).read_bytes() == before


def test_a_subprocess_is_pointed_at_it_by_its_environment(hub: HubServer, folder: Path) -> None:
    code = (
        "import sys, huggingface_hub as hub; hub.create_repo(sys.argv[1], exist_ok=True);"
        "hub.upload_folder(repo_id=sys.argv[1], folder_path=sys.argv[2])"
    )
    env = {**os.environ, **hub.client_env()}
    subprocess.run([sys.executable, "-c", code, REPO, str(folder)], env=env, check=True, timeout=60)
    assert hub.repos[REPO].files == contents(folder)


def test_it_listens_on_loopback_only_and_not_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer() as hub:
        hub.redirect_client(monkeypatch)
        assert hub.url.startswith("http://127.0.0.1:")
        HfApi().whoami()
    with pytest.raises(HTTPError):
        HfApi().whoami()
