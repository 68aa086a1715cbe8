"""Objects of pandas and of Hugging Face's datasets, if these are installed."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
import textwrap
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from warm_python import warm_python

from shmloader import DataLoader, NotSharedWarning, share, unshare
from shmloader import open as open_store
from shmloader.store import Store
from shmloader.store.handles import MappedFiles, is_shared, pack, unpack
from shmloader.store.testing import identical


@pytest.fixture
def pandas() -> Any:
    return pytest.importorskip("pandas", reason="pandas is not installed")


def make_columns(pandas: Any) -> dict[str, Any]:
    return {
        "ints": [1, 2, 3],
        "ints with NaN": [1, None, 3],
        "texts": ["x", None, "é"],
        "objects": pandas.Series(["x", None, float("nan")], dtype=object),
        "categories": pandas.Categorical(["a", None, "a"]),
        "times": pandas.to_datetime(["2020-01-01", None, "2021-01-01T10:11:12.123456789"], format="ISO8601"),
        "times with a zone": pandas.to_datetime(["2020-01-01", None, "2021-01-01"], utc=True),
        "durations": pandas.to_timedelta([1, None, 3], unit="s"),
        "nullable ints": pandas.array([1, None, 3], dtype="Int64"),
        "nullable floats": pandas.array([1.5, None, 3], dtype="Float64"),
        "nullable bools": pandas.array([True, None, False], dtype="boolean"),
        "nullable texts": pandas.array(["a", None, "b"], dtype="string"),
        "Arrow texts": pandas.array(["a", None, "b"], dtype="string[pyarrow]"),
        "periods": pandas.period_range("2020", periods=3, freq="D"),
        "intervals": pandas.interval_range(0, 3),
        "sparse": pandas.arrays.SparseArray([0, 0, 1]),
        "bytes of ints": np.array([1, 2, 255], np.uint8),
        "arrays": [np.arange(3), np.arange(2), np.zeros(0)],
        "lists": [[1], [2, "x"], []],
    }


def alike(pandas: Any, one: Any, other: Any) -> bool:
    """Identical; NaT and NA are one object each."""
    if type(one) is dict and type(other) is dict:
        return list(one) == list(other) and all(alike(pandas, one[key], other[key]) for key in one)
    return one is other if other is pandas.NaT or other is pandas.NA else identical(one, other)


def test_a_frame_has_the_rows_of_to_dict_and_a_series_those_of_tolist(pandas: Any, tmp_path: Any) -> None:
    """Types are tried alone, together with columns of every other type, and from a file."""
    columns = make_columns(pandas)
    frame = pandas.DataFrame(columns, index=["p", "q", "r"])
    cases = [(frame, frame.to_dict("records"))]
    cases += [(frame[name], frame[name].tolist()) for name in columns]
    cases += [(frame[[name]], frame[[name]].to_dict("records")) for name in columns]
    for number, (data, rows) in enumerate(cases):
        store = share(data)
        assert len(store) == 3
        store.save(tmp_path / f"{number}.arrow")
        for found in (store, open_store(tmp_path / f"{number}.arrow", allow_pickle=True)):
            assert all(alike(pandas, one, other) for one, other in zip(found, rows, strict=True)), rows


def test_frames_of_odd_shapes_have_the_rows_of_to_dict(pandas: Any) -> None:
    odd = [
        pandas.DataFrame([[1, 2], [3, 4]]),  # names that are no str
        pandas.DataFrame([[1, 2]], columns=pandas.MultiIndex.from_tuples([("a", "x"), ("b", "y")])),
        pandas.DataFrame({"a": []}),
        pandas.DataFrame(),
    ]
    for frame in odd:
        assert list(share(frame)) == frame.to_dict("records")
    frame = pandas.DataFrame({"n": range(40_000), "s": [str(n) for n in range(40_000)]})
    store = share(frame)  # in several pieces
    assert store[-1] == {"n": 39_999, "s": "39999"}
    assert store.take([5, 30_000])["n"].tolist() == [5, 30_000]


class Frames:
    def __init__(self, pandas: Any) -> None:
        names = [f"image {n}.jpg" for n in range(300_000)]
        self.frame = pandas.DataFrame(
            {"n": np.arange(300_000), "name": names, "x": np.linspace(0, 1, 300_000)}
        )
        self.series = self.frame["n"] * 2
        self.index = pandas.Index(np.arange(300_000) * 3)


def test_pandas_frames_in_a_dataset_are_frames_over_shared_memory(pandas: Any) -> None:
    original = Frames(pandas)
    shared = share(original)
    assert type(shared.frame) is pandas.DataFrame
    assert shared.frame is not original.frame
    assert shared.frame["n"].equals(original.frame["n"])
    assert shared.frame.iloc[7].to_dict() == original.frame.iloc[7].to_dict()
    assert shared.series.equals(original.series)
    assert shared.index.equals(original.index)
    assert is_shared(shared.index.to_numpy(), MappedFiles())
    again = unpack(*pack(shared))
    for frames in (shared, again):
        for values in (frames.frame["n"], frames.frame["x"], frames.series):
            assert is_shared(values.to_numpy(), MappedFiles())
    assert again.frame.iloc[-1].to_dict() == original.frame.iloc[-1].to_dict()


def test_frames_that_were_unshared_can_be_written_to_and_others_stay_the_same(pandas: Any) -> None:
    frame = pandas.DataFrame(
        {"number": np.arange(1 << 18), "nullable": pandas.array([1] * (1 << 18), "Int64")}
    )
    kept, odd = pandas.Series(np.zeros(1 << 18)), pandas.Series([lambda: 1], dtype=object)
    dataset = share(SimpleNamespace(frame=frame, column=frame["number"].copy()))
    dataset.kept, dataset.odd = kept, odd
    with pytest.raises(ValueError, match="read-only"):
        dataset.frame.loc[0, "number"] = 5
    unshare(dataset)
    dataset.frame.loc[0, ["number", "nullable"]] = 5
    dataset.column.iloc[0] = 5
    assert dataset.frame.iloc[:2].to_numpy().tolist() == [[5, 5], [1, 1]]
    assert dataset.column.tolist()[:2] == [5, 1]
    assert dataset.kept is kept
    assert dataset.odd is odd


def test_sharing_frames_again_adds_no_reducer(pandas: Any) -> None:
    reducers = []
    for _ in range(3):
        share(SimpleNamespace(frame=pandas.DataFrame({"n": np.arange(300_000)})))
        reducers.append(dict(ForkingPickler(io.BytesIO()).dispatch_table))
    assert reducers[0] == reducers[1] == reducers[2]


def test_frames_keep_their_types_and_their_index(pandas: Any) -> None:
    count = 100_000
    names = [f"image {n}.jpg" for n in range(count)]
    columns = {
        "texts": names,
        "categories": pandas.Categorical(["a", "b"] * (count // 2)),
        "times": pandas.date_range("2020", periods=count, freq="s"),
        "nullable": pandas.array([1, None] * (count // 2), dtype="Int64"),
    }
    holder = Frames(pandas)
    holder.frame = pandas.DataFrame(columns, index=pandas.MultiIndex.from_arrays([names, np.arange(count)]))
    shared = share(holder)
    assert shared.frame.equals(holder.frame)
    assert shared.frame.dtypes.equals(holder.frame.dtypes)
    assert len(pack(shared)[0]) < 20_000


def test_missing_texts_are_nan_as_in_columns_of_objects(pandas: Any) -> None:
    holder = Frames(pandas)
    for name, missing in (("nan", np.nan), ("none", None)):
        texts = [missing if n % 3 == 0 else f"caption {n}" for n in range(300_000)]
        holder.frame[name] = pandas.Series(texts, dtype=object)
    shared = share(holder)
    assert shared.frame is not holder.frame
    for frame in (shared.frame, unpack(*pack(shared)).frame):
        for name in ("nan", "none"):
            assert frame[name].isna().equals(holder.frame[name].isna())
            assert (frame[name] == "caption 1").equals(holder.frame[name] == "caption 1")
            assert repr(frame[name].iloc[0]) == repr(frame.iloc[3][name]) == "nan"
            assert identical(frame[name].iloc[1], "caption 1")


def test_a_series_of_texts_is_as_large_as_its_texts(pandas: Any) -> None:
    """Its array has only their addresses, which would be too small to share."""
    texts = pandas.Series([f"caption {n}" for n in range(50_000)], dtype=object)
    holder = SimpleNamespace(texts=texts)
    assert share(holder).texts is not texts
    assert list(share(holder).texts) == list(texts)


def test_a_frame_of_python_objects_is_left_with_a_warning(pandas: Any) -> None:
    holder = Frames(pandas)
    holder.frame["odd"] = pandas.Series([(n, "x") for n in range(300_000)], dtype=object)
    with pytest.warns(
        NotSharedWarning, match=r"Frames\.frame, a DataFrame .* are Python objects, not arrays"
    ):
        shared = share(holder)
    assert shared.frame is holder.frame
    assert shared.series is not holder.series


@pytest.fixture
def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A dataset that lies in a file."""
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("Hugging Face datasets is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict({"n": list(range(1000)), "s": [str(n) for n in range(1000)]})
    made.save_to_disk(str(tmp_path / "data"))
    return datasets.load_from_disk(str(tmp_path / "data"))


class Wrapped:
    """A dataset over another one, with something to share beside it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.rows = [{"n": n} for n in range(30_000)]

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]["n"], self.rows[index]["n"]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_hugging_face_dataset_stays_mapped_and_gives_its_rows(hugging_face: Any, start_method: str) -> None:
    shuffled = hugging_face.shuffle(seed=1)
    parts = [hugging_face, shuffled, shuffled.select([5, 3, 99]), hugging_face.select(range(10, 20))]
    for part in parts:
        assert share(part) is part
        assert hugging_face.cache_files[0] in share(part).cache_files
    assert [row["n"] for row in shuffled.select([5, 3, 99])] == [shuffled[n]["n"] for n in (5, 3, 99)]
    shared = share(Wrapped(shuffled))
    assert shared.inner is shuffled
    assert isinstance(shared.rows, Store)
    loader = DataLoader(
        shared, batch_size=100, num_workers=1, share_dataset=True, multiprocessing_context=start_method
    )
    found = [
        (n, row) for numbers, rows in loader for n, row in zip(numbers.tolist(), rows.tolist(), strict=True)
    ]
    loader.close()
    assert found == [(row["n"], number) for number, row in enumerate(shuffled)]
    assert DataLoader(shuffled, batch_size=10, share_dataset=True).dataset is shuffled


def test_a_hugging_face_dataset_in_memory_is_shared_wherever_it_is(hugging_face: Any) -> None:
    import datasets

    made = datasets.Dataset.from_dict({"n": range(200_000)})
    both = datasets.DatasetDict(train=made, mapped=hugging_face)
    for data in (both, dict(both)):
        for shared in (share(data), share(SimpleNamespace(data=data)).data):
            assert type(shared) is type(data)
            assert shared["train"][7] == {"n": 7}
            assert shared["train"].data.nbytes == made.data.nbytes
            assert len(pack(shared["train"])[0]) < 10_000
            assert shared["mapped"] is hugging_face
    assert share(hugging_face) is hugging_face
    shuffled, joined = made.shuffle(seed=1), datasets.concatenate_datasets([made, made])
    wider = made.add_column("m", list(range(200_000)))
    for one in (made, shuffled, joined, wider):
        assert DataLoader(one, share_dataset=True).dataset is one  # what it is told later reaches workers
        assert len(pack(one)[0]) < 20_000
    assert (len(joined), joined[200_007], wider[7]) == (400_000, {"n": 7}, {"n": 7, "m": 7})
    assert made[7] == {"n": 7}
    assert sorted(row["n"] for row in shuffled.select(range(100))) == sorted(shuffled[:100]["n"])


def test_a_column_of_a_hugging_face_dataset_is_a_sequence_like_any_other(hugging_face: Any) -> None:
    shuffled = hugging_face.shuffle(seed=1)
    assert list(share(shuffled["s"])) == [row["s"] for row in shuffled]


def test_a_package_of_ones_own_named_datasets_is_shared(tmp_path: Path) -> None:
    """Its classes are not mistaken for those of the library of this name."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text(
        textwrap.dedent("""
            from torch.utils.data import Dataset

            class Images(Dataset):
                def __init__(self):
                    self.samples = [{"n": n} for n in range(30_000)]
        """)
    )
    program = "import datasets, shmloader; print(type(shmloader.share(datasets.Images()).samples).__name__)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [*warm_python(), "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout.strip() == "RowStore", done.stderr


def test_times_of_pandas_and_of_python_find_each_other_as_keys(pandas: Any) -> None:
    times = pandas.date_range("2020-01-01", periods=50)
    durations = pandas.to_timedelta(range(50), unit="h")
    plain = [*times.to_pydatetime(), *(duration.to_pytimedelta() for duration in durations)]
    for keys in ([*times, *durations], plain):
        shared = share({key: number for number, key in enumerate(keys)})
        assert [shared[key] for key in [*times, *durations]] == list(range(100))
        assert [shared[key] for key in plain] == list(range(100))
        assert shared[times.to_numpy()[7]] == 7
