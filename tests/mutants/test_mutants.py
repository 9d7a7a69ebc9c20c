"""The list of mutants fits the code: `python tests/mutants/run.py` runs the tests on each."""

import ast
from pathlib import Path

import pytest
from mutants.run import ROOT, Mutant, read_mutants

MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code(mutant):
    source = Path(ROOT, "src", "tpsgd", mutant.file).read_text(encoding="utf-8")
    changed = mutant.text(source)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
    assert mutant.tests and all(Path(ROOT, test).is_file() for test in mutant.tests)


def test_mutants_have_different_names_and_cover_the_core():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    files = {mutant.file for mutant in MUTANTS}
    assert files >= {
        *("rules.py", "objectives.py", "losses.py", "projections.py", "train.py"),
        *("nets/layers.py", "nets/closed_form.py", "nets/cell_gradients.py", "nets/unrolled.py"),
        *(
            "engine/sources/batches.py",
            "engine/sources/reuse.py",
            "engine/learners/learner.py",
            "memory/plan.py",
        ),
        *(
            "memory/plan.py",
            "memory/rehearse.py",
            "features/checkpoints.py",
            "features/learner_state.py",
        ),
    }


@pytest.mark.parametrize("source", ["", "a = 1\na = 1\n"])
def test_a_mutant_whose_text_is_gone_or_occurs_twice_is_refused(source):
    with pytest.raises(ValueError, match=r"occurs \d times"):
        Mutant("", "x.py", "a = 1", "a = 2", ()).text(source)
