"""Masks as text: what is written is the mask that Python would make of it, and nothing else is run."""

import pytest
import torch

from tilewise import masks
from tilewise.maskexpr import NAMES, parse_mask
from tilewise.masks import Patch

LENGTH = 6
WHOLE = Patch(slice(0, 2), slice(0, 1), slice(0, LENGTH), slice(0, LENGTH), LENGTH, LENGTH, torch.device("cpu"))
MASKS = [
    "causal",
    "causal()",
    "causal(-1)",
    "causal('bottom_right')",
    'causal(align="bottom_right")',
    "window(2, 0)",
    "window(None, 1)",
    "window(left=1, right=None)",
    "key_lengths([3, 6])",
    "key_lengths((3, 6), padding='left')",
    "query_lengths([0, 5])",
    "documents([0, 0, 0, 1, 1, 1])",
    "documents([0] * 3 + [1] * 3)",
    "documents([[0] * 6, [0] * 2 + [1] * 4])",
    "documents([0] * 6, key_ids=[1] * 6)",
    "prefix_lm([2, 3])",
    "causal & window(2, 0)",
    "causal | key_lengths([1, 2])",
    "~causal",
    "~(causal & window(2, 0)) | documents([0, 0, 0, 1, 1, 1]) & ~window(0, 0)",
    " (causal\n& window(2, 0)) ",
]


@pytest.mark.parametrize("text", MASKS)
def test_means_what_python_means(text):
    names = {name: getattr(masks, name) for name in NAMES}
    bare = {"causal": names["causal"]()}  # `causal` without a call
    code = text.strip().replace("causal(", "make_causal(")
    expected = eval(f"({code})", {"make_causal": names["causal"], **names, **bare})
    got = parse_mask(text)
    assert repr(got) == repr(expected)
    shape = (2, 1, LENGTH, LENGTH)
    assert torch.equal(got.keep(WHOLE).expand(shape), expected.keep(WHOLE).expand(shape))


def test_every_name_is_a_mask_of_the_library():
    assert set(NAMES) == {"causal", "window", "key_lengths", "query_lengths", "documents", "prefix_lm"}
    assert all(NAMES[n] is getattr(masks, n) for n in NAMES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not an expression"),
        ("causal(", "'causal\\(' is not an expression.*column 7"),
        ("cauzal", "unknown mask 'cauzal'; there are causal, window"),
        ("dense(3)", "unknown mask 'dense'"),
        ("window", r"window: missing a required argument: 'left'.*window\(left, right, align=None\)"),
        ("window(1, 2, 3, 4)", "too many positional arguments"),
        ("causal(aline=1)", "unexpected keyword argument 'aline'"),
        ("window(-1, 0)", "left must be >= 0 or None"),
        ("causal('top')", "align must be"),
        ("key_lengths(None)", r"key_lengths\(None\): "),
        ("key_lengths([])", "must be integers"),
        ("documents([[0], [1, 2]])", "documents"),
        ("causal and window(1, 1)", "combine masks with & | ~"),
        ("not causal", "combine masks with & | ~"),
        ("causal + causal", "is not a mask"),
        ("causal & 1", "1 is not a mask"),
        ("-causal", "is not a mask"),
        ("window(1.5, 0)", "1.5 is not an argument of a mask"),
        ("window(True, 0)", "True is not an argument of a mask"),
        ("window(causal, 0)", "causal is not an argument of a mask"),
        ("documents(['a'])", "'a' is not an argument of a mask"),
        ("documents([0] * 2 + 1)", "1 is not a list of ints"),
        ("documents([0] * 99999999)", "99999999 entries is too long"),
        ("documents([[0] * 9999] * 9999)", "entries is too long"),
        ("window(*[1, 2])", "is not an argument"),
        ("window(**{})", "write the arguments out"),
        ("~" * 5000 + "causal", "nested too deeply"),
    ],
)
def test_says_what_is_wrong(text, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        parse_mask(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').getcwd()",
        "causal.__class__",
        "(lambda: causal)()",
        "[causal for _ in [1]]",
        "causal if 1 else causal",
        "(x := causal)",
        "key_lengths([open('/etc/passwd')])",
        "masks.causal()",
        "causal; causal",
    ],
)
def test_nothing_else_is_run(text):
    with pytest.raises(ValueError):
        parse_mask(text)
