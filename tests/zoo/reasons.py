"""Why a row may be beyond its limits, each reviewed: by architecture, and by what of it."""

NO_FFT = "torch has no FFT of half on a CPU, in which the model computes; `amp.keep_float` of the layer, or O4 and O1"
BATCH_NORM = "its batch norms are half as loaded, and FP32 at O5, as the level says"
TIME_STEP = (
    "its time step of 937 becomes 936, which a warning says; with `cast_inputs=['timestep']` its outputs are those as "
    "loaded, and its error is at most 1.3 of autocast's"
)
CODEBOOK = (
    "its codebook has no `forward` and is cast, and so gives other codes for a few vectors; with "
    "`amp.keep_float(model.quantizer)` its error is at most 1.1 of autocast's"
)
MAKES_FP32 = "its forward makes FP32 and multiplies it with half weights, as in plain half; the error names the line"

REASONS: dict[str, dict[str, str]] = {
    "autoformer": {"O5": NO_FFT, "O2": NO_FFT},
    "fastspeech2_conformer": dict.fromkeys(
        ("training O5", "training O2"), "in training it wants durations as labels, which the zoo does not make"
    ),
    "fnet": {"O5": NO_FFT, "O2": NO_FFT},
    "mimi": {"O5": CODEBOOK, "O2": CODEBOOK},
    "openai_privacy_filter": {
        "O2": "another expert is chosen for a few rows, as in plain half, which has 4.6; the median row has 1.3"
    },
    "patchtst": {"as loaded": BATCH_NORM},
    "reformer": dict.fromkeys(("training O5", "training O2"), "in training it wants 512 positions, in FP32 as well"),
    "slanet": {"O5": MAKES_FP32, "O2": MAKES_FP32},
    "superglue": {"as loaded": BATCH_NORM},
    "tipsv2": {"O5": MAKES_FP32, "O2": MAKES_FP32},
    "xlstm": {"O5": MAKES_FP32, "O2": MAKES_FP32},
    "diffusers/SD3Transformer2DModel": {"as loaded": TIME_STEP, "O5": TIME_STEP},
    "diffusers/WanTransformer3DModel": {"as loaded": TIME_STEP, "O5": TIME_STEP},
    "diffusers/LTXVideoTransformer3DModel": {"as loaded": TIME_STEP, "O5": TIME_STEP},
}
