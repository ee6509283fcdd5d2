"""A real notebook kernel: one output for the progress, then the result."""

import nbformat
import pytest
from nbclient import NotebookClient

# Short runs warn that they have not converged, which is not what this looks at.
SETUP = """
import warnings
from tests.support import ZIGZAG, hospitals, prior
import fedpdmc as fp
warnings.simplefilter("ignore")
"""
SAMPLE = "post = fp.sample(hospitals(), prior(), dynamics=ZIGZAG, chains=4, seed=3, burn_in=1.0, duration=10.0)"
EXTEND = "print(post.extend(duration=10.0).duration)"
QUIET = "post = fp.sample(hospitals(), prior(), dynamics=ZIGZAG, chains=4, seed=3, duration=10.0, progress=False)"


# What the kernel's own libraries deprecate among themselves.
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_shows_progress_in_one_output():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(x) for x in (SETUP, SAMPLE, EXTEND, QUIET)])
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    setup, sample, extend, quiet = (cell.outputs for cell in notebook.cells)
    assert setup == [] and quiet == []
    assert [output.output_type for output in sample] == ["display_data"]
    assert "done in" in sample[0].data["text/plain"] and "rounds" in sample[0].data["text/plain"]
    assert [output.output_type for output in extend] == ["display_data", "stream"] and extend[1].text == "20.0\n"
