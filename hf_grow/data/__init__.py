"""Data: files or a data set of the Hub become sequences for training, or a list of batches."""

from hf_grow.data.loading import DataConfig, Sequences, StreamedRows, load_batches, load_sequences, split_rows

__all__ = ["DataConfig", "Sequences", "StreamedRows", "load_batches", "load_sequences", "split_rows"]
