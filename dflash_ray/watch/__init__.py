"""What shows a run to people: rates and sums, the console line, power, W&B or TensorBoard, plots, the HTML report and the Grafana
dashboard. What the record of a step holds is in `run/metric_records.py`.

May import: dflash_ray, dflash_ray.config, dflash_ray.data.batches, dflash_ray.run.
"""
