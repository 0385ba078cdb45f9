// Steps that queue the operations of an earlier step again.
#include "stream.h"
#include "stream_checks.h"

namespace nb = nanobind;

namespace moeserve {

void copy_ids(const std::string& what, nb::handle source, nb::handle target, int64_t count) {
  const int64_t n = tensor_arg(source, "source", Element::kInt32).size();
  const auto* ids = sized_arg<int32_t>(source, "source", n);
  auto* const out = rows_arg<int32_t>(target, "target", n, 1);
  check_ids(what.c_str(), ids, static_cast<int>(n), count);
  std::copy_n(ids, n, out);
}

void Stream::begin_record(RecordedOperations& record) {
  record.operations.clear();
  record.moves = moves();
  pool_.record_in(&record.operations);
}

void Stream::end_record(RecordedOperations& record) {
  pool_.record_in(nullptr);
  if (record.moves != moves()) record.moves = -1;  // the first operations have addresses from before
}

bool Stream::repeat(const RecordedOperations& record) {
  if (record.moves != moves()) return false;
  pool_.repeat(record.operations);
  return true;
}

}  // namespace moeserve
