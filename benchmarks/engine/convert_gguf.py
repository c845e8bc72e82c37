"""Runs llama.cpp's own converter on a checkpoint: `python convert_gguf.py LLAMA_CPP_SOURCE CHECKPOINT FILE.gguf TYPE`.

Our random checkpoint has a tokenizer that the converter does not know and that is smaller than its vocabulary; both engines are given
token ids, so the file is written without one. A process of its own: the converter brings its own `gguf` package along.
"""

import sys
from pathlib import Path


def main() -> None:
    """Convert, with the converter's command line but for the tokenizer."""
    source, checkpoint, output, output_type = sys.argv[1:]
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    import convert_hf_to_gguf
    from conversion.glm import GlmMoeDsaModel

    GlmMoeDsaModel.set_vocab = GlmMoeDsaModel._set_vocab_none
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", output, "--outtype", output_type]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
