"""What a saved model says of image files, as its run would have said it of the same pixels."""

import json
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
import torch
from PIL import Image
from words import ALONE

from lab.base.drawing import colour_of
from lab.data.images.files import CorruptError
from lab.run.predict import Prediction, draw

QUICK = ["trainer.device=cpu", *ALONE]
SCENES = ["data.train_scenes=8", "data.val_scenes=4", "data.scene_pixels=64", "data.digit_pixels=[14,24]", "data.workers=0"]


@pytest.fixture(scope="module")
def trained(new_clone):
    clone = new_clone()
    done = clone.run("loss=ce", "model=tiny_resnet", "trainer.epochs=3", "name=classifier", *QUICK)
    assert done.status == 0, done.output
    done = clone.run("task=detection", "trainer.epochs=1", "name=detector", "model.score_threshold=0.0", *SCENES, *QUICK)
    assert done.status == 0, done.output
    return clone


def checkpoint(clone, name):
    (folder,) = [path for path in clone.run_folders() if path.name.endswith(name)]
    return folder / "checkpoints" / "last.pt"


def predict(clone, *words):
    return clone.warm.run("experiments/predict.py", [*map(str, words)], clone.path, apart=True)


def lines(folder):
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_a_classifier_says_of_files_what_it_says_of_its_data(trained, tmp_path, make_trainer):
    from sklearn.datasets import load_digits

    digits = load_digits()
    for place in (0, 500, 1000):
        Image.fromarray((digits.images[place] * 255 / 16).round().astype("uint8")).save(tmp_path / f"{place}.png")
    done = predict(trained, f"checkpoint={checkpoint(trained, 'classifier')}", f"out={tmp_path / 'said'}", "top=10", tmp_path)
    assert done.returncode == 0, done.stderr
    trainer = make_trainer("loss=ce")
    trainer.model.load_state_dict(torch.load(checkpoint(trained, "classifier"), weights_only=True)["model"])
    trainer.model.eval()
    found = {line["image"].rsplit("/", 1)[1]: line["found"] for line in lines(tmp_path / "said")}
    assert set(found) == {"0.png", "500.png", "1000.png"}
    from torchvision.transforms.v2.functional import resize

    norm = trainer.data.norm
    for place in (0, 500, 1000):
        pixels = resize(torch.tensor(digits.images[place], dtype=torch.float32)[None] / 16, [32, 32], antialias=True)
        with torch.no_grad():
            expected = trainer.model(((pixels - norm.mean[0]) / norm.std[0])[None]).softmax(1)[0]
        for entry in found[f"{place}.png"]:
            assert entry["score"] == pytest.approx(expected[int(entry["label"])].item(), abs=0.02)  # a file has 256 shades, the data 17
    assert (done.stdout.count("%"), done.stdout.count("and 5 more")) == (15, 3)  # predictions.jsonl has all ten
    assert len(list((tmp_path / "said").glob("*.png"))) == 3


def test_a_detector_says_of_files_what_its_evaluation_found(trained, tmp_path):
    saved = checkpoint(trained, "detector")
    run = saved.parents[1]
    (truth,) = trained.path.glob("data/digit_scenes/*/instances_val.json")
    tree = json.loads(truth.read_text())
    files = [truth.parent / "images" / image["file_name"] for image in tree["images"]]
    asked = "model.score_threshold=0.9", "score=0"  # what is asked for reaches below the model's own threshold
    done = predict(trained, f"checkpoint={saved}", f"out={tmp_path}", *asked, *files)
    assert done.returncode == 0, done.stderr
    exported = json.loads((run / "detections.json").read_text())
    names = {category["id"]: category["name"] for category in tree["categories"]}
    for image, line in zip(tree["images"], lines(tmp_path), strict=True):
        known = sorted((row["score"], names[row["category_id"]]) for row in exported if row["image_id"] == image["id"])
        said = sorted((entry["score"], entry["label"]) for entry in line["found"])
        assert [label for _, label in said] == [label for _, label in known]
        assert [score for score, _ in said] == pytest.approx([score for score, _ in known], abs=1e-4)
        with Image.open(tmp_path / line["picture"]) as picture:
            assert max(picture.size) == 320


def test_a_damaged_or_missing_file_stops_no_other(trained, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    Image.new("RGB", (20, 10), "red").save(tmp_path / "good.png")
    absent = tmp_path / "absent.png"
    done = predict(trained, f"checkpoint={checkpoint(trained, 'classifier')}", f"out={tmp_path / 'out'}", absent, tmp_path)
    assert done.returncode == 1
    assert f"error: {absent}: no such file or folder.\nerror: {tmp_path}/bad.png: cannot be read" in done.stderr
    assert [line["image"].rsplit("/", 1)[1] for line in lines(tmp_path / "out")] == ["good.png"]


def test_names_of_any_length_and_letters_are_predicted(trained, tmp_path):
    """A picture's name is its file's with a number before, which a file system of 255 bytes would not take."""
    names = ["é" * 125 + "a.png", "x" * 251 + ".png", "two\nerror: lines.png"]
    for name in names:
        Image.new("RGB", (20, 10), "red").save(tmp_path / name)
    out = tmp_path / "out"
    done = predict(trained, f"checkpoint={checkpoint(trained, 'classifier')}", f"out={out}", *(tmp_path / name for name in names))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 3
    assert f"{tmp_path}/two\\nerror: lines.png: " in done.stdout
    found = lines(out)
    assert [line["image"] for line in found] == [str(tmp_path / name) for name in names]
    assert [line["picture"] for line in found] == [f"0000-{'é' * 100}.png", f"0001-{'x' * 200}.png", "0002-two\nerror: lines.png"]
    assert all((out / line["picture"]).is_file() for line in found)


@pytest.mark.parametrize("name", ["classifier", "detector"])
def test_weights_of_nan_predict_nothing_and_are_named(trained, tmp_path, name):
    state = torch.load(checkpoint(trained, name), weights_only=True)
    weights = state["ema"] or state["model"]
    bad = next(key for key, value in weights.items() if value.dim() == 4)
    weights[bad][0, 0] = torch.nan
    torch.save(state, tmp_path / "nan.pt")
    Image.new("RGB", (64, 64)).save(tmp_path / "black.png")
    for app, words in (("predict", [f"out={tmp_path / 'said'}", tmp_path / "black.png"]), ("evaluate", ["tracking=none"])):
        command = [trained.warm.python(), f"experiments/{app}.py", f"checkpoint={tmp_path / 'nan.pt'}", *map(str, words)]
        done = subprocess.run(command, cwd=trained.path, env=trained.env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 1, done.stdout
        assert f"error: checkpoint: 1 of its {len(weights)} tensors hold nan ({bad}), so" in done.stderr
        assert "Traceback" not in done.stderr


def test_ctrl_c_keeps_the_lines_of_the_pictures_that_are_done(trained, tmp_path):
    for number in range(20_000):
        (tmp_path / f"{number:05d}.png").symlink_to("first.png")
    Image.new("RGB", (20, 10), "red").save(tmp_path / "first.png")
    words = [f"checkpoint={checkpoint(trained, 'classifier')}", f"out={tmp_path / 'out'}", str(tmp_path)]
    command = [trained.warm.python(), "experiments/predict.py", *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=trained.path, env=trained.env, **streams)
    assert "00000.png" in process.stdout.readline()
    assert lines(tmp_path / "out")[0]["picture"] == "0000-00000.png"  # each line is written when its picture is
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=600)
    done = [line["picture"] for line in lines(tmp_path / "out")]
    assert (process.returncode, error) == (130, f"interrupted: {len(done)} of 20001 images were predicted\n")
    assert set(done) <= {path.name for path in (tmp_path / "out").glob("[0-9]*.png")}
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["image.png"], "checkpoint= must be given once"),
        (["checkpoint={saved}"], "no image was given"),
        (["checkpoint={saved}", "nowhere.png"], "nowhere.png: no such file"),
        (["checkpoint={saved}", "top=none", "conf/train.yaml"], "top=none: a number from 1 to 1000"),
        (["checkpoint={saved}", "scor=0.5", "conf/train.yaml"], "scor"),
    ],
)
def test_mistakes_leave_nothing_behind(trained, words, said):
    before = trained.contents()
    done = predict(trained, *(word.format(saved=checkpoint(trained, "classifier")) for word in words))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert trained.contents() == before


def font_with(letter, path):
    """A font whose only letter is a bar."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    def bar(left, right):
        pen = TTGlyphPen(None)
        pen.moveTo((left, 0))
        for corner in ((left, 800), (right, 800), (right, 0)):
            pen.lineTo(corner)
        pen.closePath()
        return pen.glyph()

    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "bar"])
    builder.setupCharacterMap({ord(letter): "bar"})
    builder.setupGlyf({".notdef": bar(0, 0), "bar": bar(100, 900)})
    builder.setupHorizontalMetrics({".notdef": (1000, 0), "bar": (1000, 100)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Bars", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return str(path)


@pytest.fixture
def fonts(monkeypatch):
    """The machine's own fonts, for a test to choose."""
    from matplotlib import font_manager

    from lab.base import fonts

    def have(*files):
        for each in (fonts._font_of, fonts._others, fonts._letters):
            each.cache_clear()
        monkeypatch.setattr(font_manager, "findSystemFonts", lambda: list(files))

    yield have
    have()


def dark(picture):
    """Dark pixels in the line above an image."""
    return (np.asarray(picture.convert("L"))[:20] < 128).sum()


def test_names_in_any_script_are_drawn(tmp_path, fonts):
    from lab.base.fonts import drawable, font_for
    from lab.run.predict import Prediction, draw

    fonts(font_with("猫", tmp_path / "bars.ttf"))
    font = font_for(["猫"])
    assert font == str(tmp_path / "bars.ttf")
    assert drawable("猫", font) == "猫"
    assert font_for(["cat 90.0%"]).endswith("DejaVuSans.ttf")
    image = Image.new("RGB", (320, 320), "white")
    bars, none = (dark(draw(image, Prediction([name], [0.5]))) for name in ("猫猫猫猫", ""))
    assert bars > none + 4 * 30
    boxed = [np.asarray(draw(image, Prediction([name], [0.5], [[40.0, 40, 200, 200]]))) for name in ("猫", "")]
    assert (boxed[0] != boxed[1]).any()


def test_a_class_of_pixels_has_one_colour_in_all_images_and_in_the_line_above():
    from lab.run.predict import Prediction, draw

    colors = [(9, 9, 9), (250, 10, 10), (10, 250, 10), (10, 10, 250)]
    mask = torch.zeros(100, 320, dtype=torch.long)
    mask[50:, :160] = 3
    image = Image.new("RGB", (320, 100), "black")
    for other in (1, 2):
        mask[50:, 160:] = other
        given = {"mask": mask, "colors": colors, "numbers": [0, other, 3]}
        page = np.asarray(draw(image, Prediction(["ground", "other", "sea"], [0.5, 0.25, 0.25], **given)))
        for number, column in ((3, 10), (other, 300)):
            np.testing.assert_allclose(page[20 + 90, column], np.array(colors[number]) / 2, atol=2)
            assert (page[:20] == colors[number]).all(-1).any()
        assert not page[20 + 10].any()  # class 0


def test_letters_that_no_font_has_are_named(fonts):
    from lab.base.fonts import drawable, font_for

    fonts()
    font = font_for(["猫 cat"])
    assert font.endswith("DejaVuSans.ttf")
    assert drawable("猫 cat é", font) == "U+732B cat é"


def test_pictures_of_an_evaluation_have_the_letters(tmp_path, fonts, recwarn):
    from lab.base.fonts import letters_of
    from lab.tasks.plots import average_precision_picture

    fonts(font_with("猫", tmp_path / "bars.ttf"))
    with letters_of(["猫", "dog"]):
        average_precision_picture({"猫": 0.5, "dog": 0.25}, tmp_path / "picture.png")
    assert [str(each.message) for each in recwarn if "missing from" in str(each.message)] == []


def test_letters_that_no_font_has_are_boxes_in_pictures(tmp_path, fonts, recwarn):
    from lab.base.fonts import letters_of
    from lab.tasks.plots import average_precision_picture

    fonts()
    with letters_of(["猫", "dog"]):
        average_precision_picture({"猫": 0.5, "dog": 0.25}, tmp_path / "picture.png")
    assert [str(each.message) for each in recwarn if "missing from" in str(each.message)] == []


def test_a_pattern_stands_for_the_files_it_matches(tmp_path):
    from lab.results.prediction import images

    for name in ("a/1.png", "a/b/2.png", "a/b/3.txt", "odd [1].png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name, "PNG")
    found, missing, _ = images([tmp_path / "**" / "*.png", tmp_path / "odd [1].png", tmp_path / "c*.png"], tmp_path / "out")
    assert [path.name for path in found] == ["1.png", "2.png", "odd [1].png", "odd [1].png"]
    assert missing == [tmp_path / "c*.png"]


def test_names_of_boxes_stay_in_the_picture_and_differ_from_their_ground():
    for size in ((64, 48), (2000, 1500)):
        boxes = [[0.0, 0.0, size[0] / 3, size[1] / 2], [size[0] * 0.9, size[1] * 0.9, size[0] - 1.0, size[1] - 1.0]]
        drawn = draw(Image.new("RGB", size, "grey"), Prediction(["a long name of a class", "other"], [0.9, 0.8], boxes, numbers=[0, 7]))
        pixels = np.asarray(drawn)
        for number in (0, 7):
            ground = (pixels == colour_of(number)).all(-1)
            rows, columns = np.nonzero(ground)
            assert ground.sum() > 100
            near = pixels[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].reshape(-1, 3).astype(int)
            assert (abs(near.mean(1) - np.mean(colour_of(number))) > 80).any()
    assert len({colour_of(number) for number in range(80)}) == 80


@pytest.fixture
def video(tmp_path):
    """A square that moves over 12 frames of 64 x 48 pixels, 10 a second."""
    cv2 = pytest.importorskip("cv2", reason="needs OpenCV")
    path = tmp_path / "drive.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 10.0, (64, 48))
    for number in range(12):
        pixels = np.zeros((48, 64, 3), np.uint8)
        pixels[10:30, number * 3 : number * 3 + 20] = (0, 0, 255)  # red, in OpenCV's order
        writer.write(pixels)
    writer.release()
    return path


def test_the_frames_of_a_video_are_predicted_and_drawn_into_one(trained, tmp_path, video):
    from lab.results.video import frames_of

    (tmp_path / "bad.mp4").write_bytes(b"no video")
    words = [f"checkpoint={checkpoint(trained, 'detector')}", f"out={tmp_path / 'out'}", "score=0"]
    done = predict(trained, *words, video, tmp_path / "bad.mp4")
    assert done.returncode == 1
    assert f"{video}: 12 frames" in done.stdout
    assert f"error: {tmp_path}/bad.mp4: cannot be read as a video" in done.stderr
    found = lines(tmp_path / "out")
    assert [(line["frame"], line["second"]) for line in found] == [(number, number / 10) for number in range(12)]
    assert {line["picture"] for line in found} == {"0000-drive.mp4"}
    frames = list(frames_of(tmp_path / "out" / "0000-drive.mp4"))
    assert [(frame.number, frame.rate, picture.size) for frame, picture in frames] == [(number, 10.0, (320, 240)) for number in range(12)]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"0000-drive.mp4", "predictions.jsonl"}


def test_a_videos_frames_are_read_and_written_in_their_colours_and_places(tmp_path, video):
    from lab.results.video import VideoFile, frames_of

    (tmp_path / ".unfinished-copy.mp4").symlink_to(tmp_path / "elsewhere")
    with VideoFile(tmp_path / "copy.mp4") as copy:
        for frame, picture in frames_of(video):
            copy.add(picture.crop((0, 0, 63, 47)), frame.rate)
    assert not (tmp_path / "elsewhere").exists()
    for path in (video, tmp_path / "copy.mp4"):
        for frame, picture in frames_of(path):
            red, green, blue = picture.getpixel((frame.number * 3 + 10, 20))
            assert red > 200 > 60 > max(green, blue)
            assert max(picture.getpixel((60, 44))) < 40
    assert picture.size == (64, 48)


@pytest.mark.parametrize(("options", "called"), [(None, False), ("safe;0|protocol_whitelist;file,http,tcp", True)])
def test_a_video_that_names_an_address_calls_it_only_if_the_user_lets_ffmpeg(tmp_path, monkeypatch, options, called):
    """FFmpeg takes a list of addresses for a video, whatever the file's name is."""
    pytest.importorskip("cv2", reason="needs OpenCV")
    from lab.results.video import frames_of

    monkeypatch.delenv("OPENCV_FFMPEG_CAPTURE_OPTIONS", raising=False)
    if options:
        monkeypatch.setenv("OPENCV_FFMPEG_CAPTURE_OPTIONS", options)
    calls = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            calls.append(self.path)
            self.send_error(404)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "drive.mp4").write_text(f"ffconcat version 1.0\nfile http://127.0.0.1:{server.server_port}/part.mp4\n")
        with pytest.raises(CorruptError, match="cannot be read as a video"):
            list(frames_of(tmp_path / "drive.mp4"))
        server.shutdown()
    assert bool(calls) is called


def test_a_video_without_opencv_says_what_to_install(trained, tmp_path, monkeypatch, capsys):
    import predict

    monkeypatch.setitem(sys.modules, "cv2", None)
    (tmp_path / "drive.mp4").write_bytes(b"")
    assert predict.main([f"checkpoint={checkpoint(trained, 'classifier')}", str(tmp_path / "drive.mp4")]) == 1
    error = capsys.readouterr().err
    assert "is a video, and OpenCV, which reads videos, cannot be imported" in error
    assert "uv pip install opencv-python-headless" in error


def test_folders_of_folders_are_looked_into(tmp_path):
    from lab.results.prediction import images

    for name in ("a.png", "inner/b.jpg", "inner/deep/c.PNG", "inner/notes.txt", "said/0000-a.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    found, missing, passed = images([tmp_path, tmp_path / "b.png"], tmp_path / "said")
    assert (missing, passed) == ([tmp_path / "b.png"], "1 file passed over: 1 .txt")
    assert [str(path.relative_to(tmp_path)) for path in found] == ["a.png", "inner/b.jpg", "inner/deep/c.PNG"]


@pytest.mark.parametrize(
    ("word", "said"),
    [("topp=1", "Did you mean 'top'?"), ("scor=1", "Did you mean 'score'?"), ("ot=x", "Did you mean 'out'"), ("dta=x", "'data'")],
)
def test_a_misspelt_word_is_answered_with_this_apps_own(capsys, word, said):
    import predict

    assert predict.main(["checkpoint=x.pt", word, "conf"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {word}: {word.partition('=')[0]!r} is not known.")
    assert said in error
    assert all(name in error.splitlines()[-1] for name in ("checkpoint", "out", "score", "top"))


def test_what_a_tasks_predictions_do_not_read_is_refused(trained, tmp_path):
    done = predict(trained, f"checkpoint={checkpoint(trained, 'detector')}", "top=1", f"out={tmp_path / 'out'}", "data")
    assert done.returncode == 1
    assert "error: top=1: has no effect on predictions of task=detection; leave it out." in done.stderr
    assert not (tmp_path / "out").exists()
