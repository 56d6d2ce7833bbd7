"""Run in a fresh process: load every checkpoint of a folder one way and write what it computes.

python reload.py FOLDER load_grown|auto|remote_code
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    folder, way = Path(sys.argv[1]), sys.argv[2]
    if way == "remote_code":
        sys.modules["hf_grow"] = None  # from here on `import hf_grow` fails
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    if way != "remote_code":
        import hf_grow

    torch.set_num_threads(1)
    for case in json.loads((folder / "cases.json").read_text()):
        path = folder / case["name"]
        if way == "load_grown":
            model = hf_grow.load_grown(path)
        else:
            auto_class = getattr(transformers, case["auto_class"])
            model = auto_class.from_pretrained(path, trust_remote_code=way == "remote_code")
        inputs = load_file(folder / f"{case['name']}.inputs")
        with torch.no_grad():
            outputs = model.eval()(**inputs)
        found = {key: value.contiguous() for key, value in outputs.items() if isinstance(value, torch.Tensor)}
        save_file(found, folder / f"{case['name']}.{way}")
