"""The engine on a CPU against transformers and llama.cpp: same weights, same threads, same tokens, one run.

`cases.py` says what is measured and which ratio is the goal, `cached_setup.py` builds what is measured, the `*_engine.py` and
`llama_driver.cpp` run as processes of their own behind `engine_process.py`, `measurement.py` takes turns between them, `report_rows.py`
makes rows of the results, `roofline.py` says what the machine would allow.
"""
