"""From what the user calls a model to a local folder, and what the folder's JSON files say. Without torch.

    fetch.py          `fetch_model`: a folder, a file, a hub's id or nothing, to a folder in Hugging Face's layout
    default_model.py  the model that is served when none is named
    gguf.py           GGUF files as such folders, and their tensors
    config.py         from the folder's JSON files to a `ModelConfig`
    quantization.py   how the weights are quantized, as config.json says it

Reading weights is `models/weight.py`. Read `config.py`.
"""

from minisgl.checkpoint.config import ModelConfig, RotaryConfig
from minisgl.checkpoint.fetch import fetch_model, model_name
from minisgl.checkpoint.quantization import Quantization, WeightFormat

__all__ = ["ModelConfig", "Quantization", "RotaryConfig", "WeightFormat", "fetch_model", "model_name"]
