export PYTHONPATH=src:. PYTHONUNBUFFERED=1 WEFT_HOME=/tmp/weft_home
(timeout 400 python3 -m pytest -m gpu -n 12 -q --dist load -p no:cacheprovider -p no:benchmark --timeout 280 > $OUT/gpu_tests.log 2>&1; tail -40 $OUT/gpu_tests.log | cut -c1-230)
(timeout 60 python3 -m weft probe 2>&1 | tail -14)
python3 - <<'PY' > /tmp/p.toml
print('graph = "demo"\nseed = [0, 1]\n[model]\nname = ["gcn", "gat"]\nhidden = 16\n[train]\nepochs = 20')
PY
timeout 60 python3 -m weft plan /tmp/p.toml --out /tmp/p.json 2>&1 | head -12; timeout 90 python3 -m weft run /tmp/p.json --out /tmp/runs/p 2>&1 | tail -1 | cut -c1-400
