"""Turn an exported student into a GGUF file for llama.cpp, by llama.cpp's own converter.

The converter comes with llama.cpp's sources, as they are in its repository and in the source distribution of
llama-cpp-python. It needs torch, transformers, gguf and sentencepiece. It knows tokenizers by hashes of a text as they
cut it, and has never seen that of a run: so it is told that text is cut as by GPT-2.

    python examples/gguf/to_gguf.py llama.cpp student student.gguf
"""

import importlib
import sys


def main(sources: str, student: str, file: str) -> None:
    """Convert the folder `student`, by the converter in the folder `sources`, into a file."""
    sys.path.insert(0, sources)
    base = importlib.import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda _model, _tokenizer: "gpt-2"
    sys.argv[1:] = [student, "--outfile", file, "--outtype", "f32"]
    importlib.import_module("convert_hf_to_gguf").main()


if __name__ == "__main__":
    main(*sys.argv[1:])
