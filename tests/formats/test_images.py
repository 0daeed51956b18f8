import os
import struct
import warnings
import zlib
from io import BytesIO

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import load_image as transformers_load_image

from omnibal.config.section import DataSection
from omnibal.formats.media import MOST_PIXELS, image_size, load_image


def picture(width=7, height=4, mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def save_turned(path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture().save(path, exif=exif)
    return path


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.tif", "a.gif", "a.bmp"])
def test_size_is_that_of_the_decoded_image(tmp_path, name):
    picture().save(tmp_path / name)
    assert image_size(tmp_path / name) == load_image(tmp_path / name).size == (7, 4)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_images_are_upright_as_in_transformers(tmp_path, name, orientation):
    path = save_turned(tmp_path / name, orientation)
    expected = transformers_load_image(str(path))
    assert image_size(path) == expected.size
    assert np.array_equal(np.asarray(load_image(path)), np.asarray(expected))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    name = "a.jpg" if mode == "CMYK" else "a.png"
    picture(mode=mode).save(tmp_path / name)
    assert load_image(tmp_path / name).mode == "RGB"


def test_size_comes_from_the_header_alone(tmp_path):
    header = struct.pack(">IIBBBBB", 5000, 3000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    path = tmp_path / "cut.png"
    path.write_bytes(start + struct.pack(">I", 100) + b"IDAT" + b"\0" * 10)
    assert image_size(path) == (5000, 3000)
    with pytest.raises(ValueError, match=r"image must be decodable, got .*cut\.png"):
        load_image(path)


def test_missing_and_unreadable_files_are_named(tmp_path):
    (tmp_path / "text.png").write_text("no image")
    for read in (image_size, load_image):
        with pytest.raises(ValueError, match=r"image must exist, got .*none\.png"):
            read(tmp_path / "none.png")
        with pytest.raises(ValueError, match=r"readable header, got .*text\.png"):
            read(tmp_path / "text.png")
        with pytest.raises(ValueError, match="image must be a file"):
            read(tmp_path)


RAMP = np.array([[0, 255, 256], [32767, 32768, 65535]], dtype=np.uint16)


def first_channel(path):
    image = load_image(path)
    assert image.mode == "RGB"
    assert image.size == image_size(path)
    return np.asarray(image)[..., 0].tolist()


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm", "a.jp2"])
def test_16_bits_are_scaled_to_8_as_those_of_colours_are(tmp_path, name):
    Image.fromarray(RAMP).save(tmp_path / name)
    assert first_channel(tmp_path / name) == [[0, 0, 1], [127, 128, 255]]


def test_white_may_be_the_smallest_of_16_bits(tmp_path):
    Image.fromarray(RAMP).save(tmp_path / "a.tif", tiffinfo={262: 0})
    assert first_channel(tmp_path / "a.tif") == [[255, 255, 254], [128, 127, 0]]


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_images_of_16_bits_are_upright(tmp_path, name, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(RAMP).save(tmp_path / f"deep-{name}", exif=exif)
    Image.fromarray((RAMP >> 8).astype(np.uint8)).save(tmp_path / name, exif=exif)
    assert first_channel(tmp_path / f"deep-{name}") == first_channel(tmp_path / name)


def test_floats_from_0_to_1_are_scaled(tmp_path):
    Image.fromarray(np.array([[0, 0.25, 0.5, 1]], dtype=np.float32)).save(tmp_path / "a.tif")
    assert first_channel(tmp_path / "a.tif") == [[0, 64, 128, 255]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([[0, 255.0]], dtype=np.float32), "image must have floats from 0 to 1, got 0 … 255 in .*a.tif"),
        (np.array([[0, np.nan]], dtype=np.float32), "image must have floats from 0 to 1, got nan … nan in"),
        (
            np.array([[0, 70_000]], dtype=np.int32),
            "image must have 8 or 16 bits a value, or floats, got 32-bit integers",
        ),
    ],
)
def test_values_of_unknown_scale_are_refused(tmp_path, values, message):
    Image.fromarray(values).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=message):
        load_image(tmp_path / "a.tif")


@pytest.mark.parametrize("side", [10_000, 14_000, 20_000])
def test_images_beyond_pillows_own_limits_are_refused_by_the_key_and_allowed_by_it(tmp_path, monkeypatch, side):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", MOST_PIXELS)
    Image.new("1", (side, side)).save(tmp_path / "a.png")
    for read in (image_size, load_image):
        with pytest.raises(ValueError, match=r"pixels, got .*a\.png.*; omnibal\.data\.max_image_pixels"):
            read(tmp_path / "a.png")
    with warnings.catch_warnings(action="error"):
        assert image_size(tmp_path / "a.png", side**2) == (side, side)
        with pytest.raises(ValueError, match=f"at most {side**2 - 1:,} pixels, got {side:,} x {side:,} in"):
            image_size(tmp_path / "a.png", side**2 - 1)
    assert DataSection(max_image_pixels=side**2).max_image_pixels == side**2


def test_pixels_are_bounded(tmp_path):
    picture(300, 200).save(tmp_path / "a.png")
    for read in (image_size, load_image):
        read(tmp_path / "a.png", 60_000)
        with pytest.raises(
            ValueError, match=r"image must have at most 59,999 pixels, got 300 x 200 in .*a\.png; omnibal"
        ):
            read(tmp_path / "a.png", 59_999)
    header = struct.pack(">IIBBBBB", 13_000, 13_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    with (
        pytest.warns(Image.DecompressionBombWarning),
        pytest.raises(ValueError, match="at most 89,478,485 pixels, got 13,000 x 13,000"),
    ):
        image_size(start + struct.pack(">I", 100) + b"IDAT" + b"\0" * 10)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    for read in (image_size, load_image):
        with pytest.raises(ValueError, match=r"image must be a file, got .*a\.png"):
            read(tmp_path / "a.png")


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError, KeyError, struct.error, SyntaxError, TypeError])
def test_however_a_decoder_fails_the_file_is_named(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error("odd")

    picture().save(tmp_path / "a.jpg")
    monkeypatch.setattr(Image.Image, "getexif", fail)
    for read in (image_size, load_image):
        with pytest.raises(ValueError, match=r"image must be decodable, got .*a\.jpg \(.*odd"):
            read(tmp_path / "a.jpg")


def _contents():
    """Whole files of several formats, with an orientation each."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("JPEG", "PNG", "WEBP", "TIFF", "GIF"):
        file = BytesIO()
        picture(20, 12).save(file, kind, exif=exif)
        yield file.getvalue()


@given(
    st.sampled_from([*_contents()]),
    st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=6),
    st.integers(0),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_are_read_or_refused(tmp_path, content, changes, end):
    damaged = bytearray(content)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    path = tmp_path / "damaged"
    path.write_bytes(damaged[: end % (2 * len(damaged)) or None])
    for read in (image_size, load_image):
        try:
            read(path)
        except ValueError as error:
            assert str(error).startswith("image must ")
