#include "ngrams/ngram_table.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "formats/formats.h"

namespace moeserve {

bool OpenFile::is_changed() const {
  struct stat now;
  if (fstat(fd, &now) != 0) return true;
#ifdef __APPLE__
  const timespec changed = now.st_mtimespec;
#else
  const timespec changed = now.st_mtim;
#endif
  const int64_t ns = static_cast<int64_t>(changed.tv_sec) * 1'000'000'000 + changed.tv_nsec;
  return static_cast<int64_t>(now.st_dev) != device || static_cast<int64_t>(now.st_ino) != inode ||
         static_cast<int64_t>(now.st_size) != bytes || ns != changed_ns;
}

NgramTable::NgramTable(std::vector<RowPart> parts, std::vector<OpenFile> files, NgramHeads heads,
                       RowForm form, int64_t cached)
    : parts_(std::move(parts)), files_(std::move(files)), heads_(std::move(heads)), form_(form) {
  int64_t rows = 0;
  for (const RowPart& part : parts_) {
    if (part.rows < 0 || part.stride < 1 || part.factor < 1 || part.modulus < 1) {
      throw std::invalid_argument("parts: negative or empty");
    }
    rows += part.rows;
  }
  const size_t count = heads_.rows.size(), orders = heads_.multipliers.size() - 1;
  if (heads_.multipliers.size() < 2 || count % orders != 0 || heads_.offsets.size() != count) {
    throw std::invalid_argument("heads: their numbers do not fit the orders");
  }
  for (size_t head = 0; head < count; ++head) {
    if (heads_.rows[head] < 1 || heads_.offsets[head] < 0 ||
        heads_.offsets[head] > rows - heads_.rows[head]) {
      throw std::invalid_argument("heads: rows outside the table of " + std::to_string(rows) + " rows");
    }
  }
  if (cached < 1) throw std::invalid_argument("cached: at least one row is needed");
  row_at_.assign(cached, -1);
  cache_.reset(new uint8_t[cached * form_.bytes]);  // not touched: the system gives pages at first use
}

// Unsigned, so that products wrap as numpy's do.
void NgramTable::hash(int32_t token, const int32_t* previous, int64_t* rows) const {
  const int64_t orders = before(), per_order = heads() / orders;
  uint64_t mixed = static_cast<uint64_t>(std::max(token, 0)) * static_cast<uint64_t>(heads_.multipliers[0]);
  bool ended = false;
  for (int64_t order = 0, head = 0; order < orders; ++order) {
    const int64_t earlier = previous[order];
    ended = ended || earlier < 0 || earlier == heads_.end_token;
    mixed ^= static_cast<uint64_t>(ended ? heads_.end_token : earlier) *
             static_cast<uint64_t>(heads_.multipliers[order + 1]);
    for (int64_t i = 0; i < per_order; ++i, ++head) {
      int64_t row = static_cast<int64_t>(mixed) % heads_.rows[head];
      if (row < 0) row += heads_.rows[head];
      rows[head] = row + heads_.offsets[head];
    }
  }
}

bool NgramTable::is_changed() const {
  return std::any_of(files_.begin(), files_.end(), [](const OpenFile& file) { return file.is_changed(); });
}

void NgramTable::read(int64_t row, uint8_t* out) const {
  const RowPart* part = parts_.data();
  while (row >= part->rows) row -= part++->rows;
  const uint8_t* from = part->at + row * part->factor % part->modulus * part->stride;
  if (form_.scaled_block == 0) {
    std::memcpy(out, from, form_.bytes);
    return;
  }
  for (int64_t col = 0; col < form_.cols; col += form_.scaled_block) {
    std::memcpy(out, &form_.scale, sizeof form_.scale);
    std::memcpy(out + sizeof form_.scale, from + col, form_.scaled_block);
    out += sizeof form_.scale + form_.scaled_block;
  }
}

void NgramTable::take(int64_t number, const int32_t* tokens, const int32_t* previous, int64_t n,
                      uint8_t* out) {
  const std::lock_guard lock(mutex_);
  const int64_t heads = this->heads(), bytes = form_.bytes, places = static_cast<int64_t>(row_at_.size());
  rows_.resize(n * heads);
  missing_.clear();
  for (int64_t t = 0; t < n; ++t) hash(tokens[t], previous + t * before(), rows_.data() + t * heads);
  for (int64_t i = 0; i < n * heads; ++i) {
    const int64_t place = rows_[i] % places;
    if (row_at_[place] == rows_[i]) {
      std::memcpy(out + i * bytes, cache_.get() + place * bytes, bytes);
    } else {
      missing_.push_back({rows_[i], i});
    }
  }
  hits_ += n * heads - static_cast<int64_t>(missing_.size());
  if (missing_.empty()) return;
  // Ascending, so that the file is read in order. A mapped file that has become shorter must not be touched.
  std::sort(missing_.begin(), missing_.end(),
            [](const Missing& a, const Missing& b) { return a.row != b.row ? a.row < b.row : a.at < b.at; });
  bool failed = is_changed();
  for (size_t i = 0; i < missing_.size() && !failed; ++i) {
    uint8_t* to = out + missing_[i].at * bytes;
    if (i > 0 && missing_[i].row == missing_[i - 1].row) {
      std::memcpy(to, out + missing_[i - 1].at * bytes, bytes);
    } else {
      read(missing_[i].row, to);
      ++reads_;
    }
  }
  failed = failed || is_changed();
  for (auto it = missing_.rbegin(); it != missing_.rend();
       ++it) {  // of rows that share a place, the first one stays
    uint8_t* to = out + it->at * bytes;
    if (failed) {
      std::memset(to, 0, bytes);
      failed_.emplace_back(number, it->at / heads);
    } else {
      const int64_t place = it->row % places;
      row_at_[place] = it->row;
      std::memcpy(cache_.get() + place * bytes, to, bytes);
    }
  }
}

void NgramTable::embed(int64_t number, const int32_t* tokens, const int32_t* previous, int64_t n,
                       float* out) {
  const int64_t rows = n * heads();
  const auto taken = std::make_unique<uint8_t[]>(rows * form_.bytes);
  take(number, tokens, previous, n, taken.get());
  dequantize_row(form_.type, taken.get(), rows * form_.cols, out);
}

std::vector<int64_t> NgramTable::take_failures(int64_t but) {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> tokens;
  std::erase_if(failed_, [&](const std::pair<int64_t, int64_t>& each) {
    if (each.first > begun_ - but) return false;
    tokens.push_back(each.second);
    return true;
  });
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  return tokens;
}

std::pair<int64_t, int64_t> NgramTable::take_counts() {
  const std::lock_guard lock(mutex_);
  return {std::exchange(hits_, 0), std::exchange(reads_, 0)};
}

void moeserve_ngram_job(void* of) {
  const std::unique_ptr<NgramJob> job(static_cast<NgramJob*>(of));
  job->table->embed(job->number, job->tokens, job->previous.data(), job->n, job->out);
}

}  // namespace moeserve
