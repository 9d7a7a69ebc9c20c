"""The options of the command line and the words that they take."""

from typing import Annotated

import typer

SCHEDULES = ("sequential", "simultaneous")
LOSSES = ("mse", "cross-entropy", "bce")
HEADS = ("adam", "ridge")
INITS = ("zeros", "uniform", "scaled-uniform", "reservoir")

OWN_DATA = (
    "digits, mnist, cifar10, seq-mnist-rows, eeg, tweets, ... (see: tpsgd data list); FILE.npz, "
    "FILE.csv, FILE.py:FUNCTION or a folder"
)
MODELS = (
    "mlp:256,256 (widths), cnn:16x5,16x5 (filters x kernel), rnn:512 (units), birnn:512 (both "
    "ways), rnn:512,512+256 (a perceptron after the +), paper-rnn:512, torch-rnn:512 or "
    "FILE.py:FUNCTION."
)
DataWord = Annotated[str, typer.Option("--data", help=f"{OWN_DATA} of images.")]
ModelWord = Annotated[str, typer.Option("--model", help=MODELS)]
Epochs = Annotated[int, typer.Option(help="Passes over the data, per block.", min=1)]
Seed = Annotated[int, typer.Option(help="Of weights, projections and sample order.", min=0)]
BatchSize = Annotated[int, typer.Option(help="Samples per step.", min=1)]
Rate = Annotated[
    float | None, typer.Option(help="Learning rate; the optimizer's own (Adam: 1e-3) if not given.")
]
ScheduleWord = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="sequential (the default) or simultaneous (DFA and sDFA: always).",
    ),
]
LossWord = Annotated[
    str | None, typer.Option("--loss", help=f"Of the last block: {', '.join(LOSSES)}.")
]
ActivationWord = Annotated[
    str,
    typer.Option(
        "--activation",
        help="leaky-relu, relu, tanh, sigmoid, gelu, silu, softplus; after recurrent layers, the "
        "perceptron's.",
    ),
]
Window = Annotated[
    int | None, typer.Option(help="Recurrent: time steps read together; more is faster.", min=1)
]
InitWord = Annotated[
    str | None, typer.Option("--init", help=f"Recurrent: initial weights: {', '.join(INITS)}.")
]
Leak = Annotated[
    float | None,
    typer.Option(help="rnn: and birnn: the share of the state that a step renews, up to 1."),
]
Head = Annotated[
    str | None,
    typer.Option(help="The last layer: adam, or ridge, in closed form (recurrent nets: ridge)."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", min=1)]
MaxTrain = Annotated[int | None, typer.Option(help="Use that many training samples.", min=1)]
SetName = Annotated[
    str, typer.Argument(metavar="NAME", help="digits, mnist, seq-mnist-rows, ...; see: list.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
