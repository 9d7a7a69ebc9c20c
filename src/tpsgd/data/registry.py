"""The built-in data sets: where they come from, what they hold, how they are checked."""

import difflib
from dataclasses import replace
from functools import partial

from tpsgd.data import eeg, formats, images, seq_mnist, tweets, ucf101
from tpsgd.data.entry import Dataset
from tpsgd.errors import TpsgdError

OWN = "FILE.npz, FILE.csv, FILE.py:FUNCTION or a folder of images"


TEN = tuple("0123456789")


def _idx(*md5: str) -> tuple[tuple[str, str], ...]:
    return tuple(zip(formats.IDX_FILES, (f"md5:{m}" for m in md5), strict=True))


DIGITS = Dataset(
    name="digits",
    about="handwritten digits, 8 x 8, as they come with scikit-learn",
    classes=TEN,
    shape=(1, 8, 8),
    train=1438,
    test=359,
    licence="CC BY 4.0",
    citation="Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998",
    read=formats.digits,
)

MNIST = Dataset(
    name="mnist",
    about="handwritten digits, 28 x 28",
    classes=TEN,
    shape=(1, 28, 28),
    train=60_000,
    test=10_000,
    licence="CC BY-SA 3.0",
    citation="LeCun et al., Gradient-based learning applied to document recognition, 1998",
    read=formats.mnist_like,
    folder="mnist",
    files=formats.IDX_FILES,
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    downloads=_idx(
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
)

FASHION = replace(
    MNIST,
    name="fashion-mnist",
    about="articles of clothing, 28 x 28 grey",
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    licence="MIT",
    citation="Xiao, Rasul and Vollgraf, Fashion-MNIST, arXiv:1708.07747, 2017",
    folder="fashion-mnist",
    mirrors=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    downloads=_idx(
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)

CIFAR10 = Dataset(
    name="cifar10",
    about="photographs of ten kinds of things, 32 x 32 colour",
    classes=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    shape=(3, 32, 32),
    train=50_000,
    test=10_000,
    licence="none stated; cite the report",
    citation="Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    read=formats.cifar,
    folder="cifar-10-batches-bin",
    files=formats.CIFAR_FILES,
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    downloads=(("cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),),
)

SEQ_ROWS = replace(
    MNIST,
    name="seq-mnist-rows",
    about="handwritten digits, read row by row from top to bottom",
    shape=(28, 28),
    read=seq_mnist.rows,
)

SEQ_PIXELS = replace(
    MNIST,
    name="seq-mnist-pixels",
    about="handwritten digits, averaged down to 7 x 7 and read pixel by pixel",
    shape=(49, 1),
    read=seq_mnist.pooled_pixels,
)

EEG = Dataset(
    name="eeg",
    about="a second of brain waves: seizure, or a healthy person with open eyes",
    classes=("healthy", "seizure"),
    shape=(45, 1),
    train=3450,
    test=1150,
    licence="CC BY 4.0",
    citation="Andrzejak et al., Indications of nonlinear deterministic structures in EEG, 2001",
    read=partial(eeg.read, against=eeg.HEALTHY, by_recording=True),
    folder="eeg",
    files=("data.csv",),
    by_hand="UCI withdrew its 'Epileptic Seizure Recognition' table; take data.csv from a copy of"
    " it (columns: the row's name such as X21.V1.791, X1 to X178, y from 1 to 5)",
)
EEG_ROWS = replace(
    EEG,
    name="eeg-rows",
    about="as eeg, but rows of one recording lie on both sides of the split",
    read=partial(eeg.read, against=eeg.HEALTHY, by_recording=False),
)
EEG_TUMOUR = replace(
    EEG,
    name="eeg-tumour",
    about="a second of brain waves: seizure, or between seizures next to a tumour",
    classes=("tumour", "seizure"),
    read=partial(eeg.read, against=eeg.TUMOUR, by_recording=True),
)
EEG_TUMOUR_ROWS = replace(
    EEG_TUMOUR,
    name="eeg-tumour-rows",
    about="as eeg-tumour, but rows of one recording lie on both sides of the split",
    read=partial(eeg.read, against=eeg.TUMOUR, by_recording=False),
)

TWEETS = Dataset(
    name="tweets",
    about="tweets, glad or sad, as numbers of frequent words",
    classes=("negative", "positive"),
    shape=(tweets.STEPS,),
    train=100_000,
    test=18_736,
    licence="none stated; cite the report",
    citation="Go, Bhayani and Huang, Twitter Sentiment Classification, Stanford, 2009",
    read=tweets.as_tokens,
    folder="sentiment140",
    files=(tweets.TRAIN, tweets.TEST),
    by_hand="Stanford's Sentiment140 page offers tables of six columns without a header (0 negative"
    " or 4 positive, id, date, query, user, text); take two that share no tweets",
    vocabulary=tweets.VOCABULARY,
)
TWEETS_HOLDOUT = replace(
    TWEETS,
    name="tweets-holdout",
    about="as tweets, but tested on a part of training.csv: glad and sad differ in their dates",
    train=75_000,
    test=25_000,
    files=(tweets.TRAIN,),
)
VECTORS = replace(
    TWEETS,
    name="tweets-vectors",
    about="tweets, glad or sad, as GloVe vectors of their words",
    shape=(tweets.STEPS, 100),
    citation=TWEETS.citation + "; Pennington, Socher and Manning, GloVe, EMNLP 2014",
    read=tweets.as_vectors,
    files=(*TWEETS.files, tweets.GLOVE),
    by_hand=TWEETS.by_hand + ", and glove.6B.100d.txt from Stanford's GloVe page",
    vocabulary=None,
)
VECTORS_HOLDOUT = replace(
    VECTORS,
    name="tweets-vectors-holdout",
    about="as tweets-vectors, but tested on a part of training.csv: glad and sad differ in dates",
    train=75_000,
    test=25_000,
    files=(tweets.TRAIN, tweets.GLOVE),
)

UCF101 = Dataset(
    name="ucf101",
    about="videos of people doing things, as features of ten of their frames",
    classes=(),
    shape=(ucf101.STEPS, 2048),
    train=9537,
    test=3783,
    licence="none stated; cite the report",
    citation="Soomro, Zamir and Shah, UCF101, CRCV-TR-12-01, 2012",
    read=ucf101.read,
    folder="ucf101",
    files=ucf101.LISTS,
    by_hand="take the videos and the split lists from its page at the University of Central"
    f" Florida; {ucf101.MAKE}",
    unnamed=101,
)

IMAGENETTE = Dataset(
    name="imagenette",
    about="photographs of ten easy classes of ImageNet, 160 x 160 colour",
    classes=(
        *("tench", "English springer", "cassette player", "chain saw", "church"),
        *("French horn", "garbage truck", "gas pump", "golf ball", "parachute"),
    ),
    shape=(3, 160, 160),
    train=9469,
    test=3925,
    licence="Apache-2.0 (the collection); ImageNet's terms for the photographs",
    citation="Howard, Imagenette, 2019; Deng et al., ImageNet, CVPR 2009",
    read=images.imagenette,
    folder="imagenette2-160",
    files=("train/n01440764", "val/n01440764"),
    by_hand="take imagenette2-160.tgz from fast.ai's page of Imagenette and unpack it",
)

DATASETS: dict[str, Dataset] = {
    entry.name: entry
    for entry in (
        *(DIGITS, MNIST, FASHION, CIFAR10, IMAGENETTE, SEQ_ROWS, SEQ_PIXELS),
        *(EEG, EEG_ROWS, EEG_TUMOUR, EEG_TUMOUR_ROWS),
        *(TWEETS, TWEETS_HOLDOUT, VECTORS, VECTORS_HOLDOUT, UCF101),
    )
}


def find(name: str) -> Dataset:
    """The built-in set of that name, or an error that suggests the closest one."""
    if name in DATASETS:
        return DATASETS[name]
    close = difflib.get_close_matches(name.lower(), DATASETS, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"built in are {', '.join(DATASETS)}."
    raise TpsgdError(f"'{name}' is no built-in data set, nor {OWN}; {hint}")
