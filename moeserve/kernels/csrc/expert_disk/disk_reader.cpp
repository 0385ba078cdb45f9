#include "expert_disk/disk_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

namespace moeserve {
namespace {

constexpr int64_t kBlock = 4096;  // what O_DIRECT's offsets, sizes and addresses are multiples of

// Memory of one thread for one piece.
class Staging {
 public:
  ~Staging() { ::operator delete(bytes_, std::align_val_t(kBlock)); }
  uint8_t* room(size_t size) {
    if (size > size_) {
      ::operator delete(std::exchange(bytes_, nullptr), std::align_val_t(kBlock));
      size_ = 0;
      bytes_ = static_cast<uint8_t*>(::operator new(size, std::align_val_t(kBlock)));
      size_ = size;
    }
    return bytes_;
  }

 private:
  uint8_t* bytes_ = nullptr;
  size_t size_ = 0;
};

// Throws std::system_error.
FileTime time_of(int fd) {
  struct stat now;
  if (fstat(fd, &now) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
  return {now.st_size, now.st_mtim.tv_sec, now.st_mtim.tv_nsec};
}

// Reads the bytes [begin, end) of a file; the bytes before `needed` must exist. Returns false on failure and sets
// `error`; with `direct`, the caller then tries again without it.
bool read_range(int fd, bool direct, int64_t begin, int64_t end, int64_t needed, uint8_t* to,
                std::string& error) {
  int64_t at = begin;
  while (at < needed) {
    const ssize_t count = pread(fd, to + (at - begin), static_cast<size_t>(end - at), at);
    if (count < 0) {
      if (errno == EINTR) continue;
      error = std::strerror(errno);
      return false;
    }
    if (count == 0) {
      error = "the file ends at byte " + std::to_string(at) + " and is shorter than when it was opened";
      return false;
    }
    at += count;
    // A direct read continues at the beginning of a block. After a read of less than a block, buffered reads take over.
    if (direct && at < needed && at % kBlock != 0) {
      at = at / kBlock * kBlock;
      if (count < kBlock) return false;
    }
  }
  return true;
}

}  // namespace

DiskReader::Shared::~Shared() {
  for (const File& file : files) {
    if (file.buffered >= 0) close(file.buffered);
    if (file.direct >= 0) close(file.direct);
  }
}

DiskReader::DiskReader(const Kernels& kernels, const std::vector<std::string>& paths, int threads,
                       OnDone on_done)
    : shared_(std::make_shared<Shared>()) {
  shared_->kernels = kernels;
  shared_->on_done = std::move(on_done);
  for (const std::string& path : paths) {
    File& file = shared_->files.emplace_back();
    file.path = path;
    file.buffered = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file.buffered < 0) throw std::system_error(errno, std::generic_category(), path);
    file.time = time_of(file.buffered);
#if defined(O_DIRECT)
    file.direct = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
#endif
  }
  shared_->threads = threads;
  for (int i = 0; i < threads; ++i) std::thread(thread_main, shared_).detach();
}

DiskReader::~DiskReader() {
  std::unique_lock lock(shared_->mutex);
  shared_->stop = true;
  shared_->has_work.notify_all();
  shared_->has_left.wait_for(lock, std::chrono::duration<double>(kPatience),
                             [this] { return shared_->threads == 0; });
}

void DiskReader::add(std::vector<DiskPiece> pieces, bool urgent) {
  {
    const std::lock_guard lock(shared_->mutex);
    for (DiskPiece& piece : pieces) (urgent ? shared_->urgent : shared_->ahead).insert(std::move(piece));
  }
  shared_->has_work.notify_all();
}

std::vector<DiskPiece> DiskReader::take_of(Queue& queue, int layer, int expert) {
  std::vector<DiskPiece> taken;
  for (auto at = queue.begin(); at != queue.end();) {
    if (at->layer != layer || at->expert != expert) {
      ++at;
      continue;
    }
    taken.push_back(*at);
    at = queue.erase(at);
  }
  return taken;
}

void DiskReader::hurry(int layer, int expert) {
  {
    const std::lock_guard lock(shared_->mutex);
    for (const DiskPiece& piece : take_of(shared_->ahead, layer, expert)) shared_->urgent.insert(piece);
  }
  shared_->has_work.notify_all();
}

int DiskReader::cancel(int layer, int expert) {
  const std::lock_guard lock(shared_->mutex);
  return static_cast<int>(take_of(shared_->ahead, layer, expert).size());
}

int64_t DiskReader::busy_us() {
  const std::lock_guard lock(shared_->mutex);
  Clock::duration busy = shared_->busy;
  if (shared_->reading > 0) busy += Clock::now() - shared_->busy_since;
  return std::chrono::duration_cast<std::chrono::microseconds>(busy).count();
}

double DiskReader::bytes_per_s() {
  const std::lock_guard lock(shared_->mutex);
  return shared_->late_seconds > 0 ? shared_->late_bytes / shared_->late_seconds : 0;
}

void DiskReader::begin_piece(Shared& shared, bool is_urgent) {
  shared.reading_urgent += is_urgent;
  if (shared.reading++ > 0) return;
  shared.busy_since = Clock::now();
  shared.burst_bytes = 0;
}

void DiskReader::end_piece(Shared& shared, bool is_urgent, int64_t bytes) {
  shared.reading_urgent -= is_urgent;
  shared.burst_bytes += bytes;
  if (--shared.reading == 0) {
    const Clock::duration burst = Clock::now() - shared.busy_since;
    shared.busy += burst;
    if (shared.late_bytes > kLateBytes) shared.late_bytes /= 2, shared.late_seconds /= 2;
    shared.late_bytes += static_cast<double>(shared.burst_bytes);
    shared.late_seconds += std::chrono::duration<double>(burst).count();
  }
  if (shared.reading_urgent == 0 && !shared.ahead.empty()) shared.has_work.notify_all();
}

void DiskReader::thread_main(const std::shared_ptr<Shared>& shared) {
  Staging staging;
  std::unique_lock lock(shared->mutex);
  for (;;) {
    shared->has_work.wait(lock, [&] {
      return shared->stop || !shared->urgent.empty() ||
             (!shared->ahead.empty() && shared->reading_urgent == 0);
    });
    if (shared->stop) break;
    const bool is_urgent = !shared->urgent.empty();
    Queue& queue = is_urgent ? shared->urgent : shared->ahead;
    const DiskPiece piece = *queue.begin();
    queue.erase(queue.begin());
    begin_piece(*shared, is_urgent);
    lock.unlock();

    const File& file = shared->files[piece.file];
    const int64_t needed = piece.offset + piece.bytes;
    const int64_t begin = piece.offset / kBlock * kBlock, end = (needed + kBlock - 1) / kBlock * kBlock;
    std::string error;
    bool has_read = false;
    uint8_t* to = nullptr;
    try {
      to = staging.room(static_cast<size_t>(end - begin));
      has_read = file.direct >= 0 && read_range(file.direct, true, begin, end, needed, to, error);
      if (!has_read) has_read = read_range(file.buffered, false, begin, end, needed, to, error);
      if (has_read && time_of(file.buffered) != file.time) {
        has_read = false;
        error = "the file was changed while it was served; restart the server";
      }
    } catch (const std::bad_alloc&) {
      error = "no memory for the read";
    } catch (const std::system_error& failed) {
      has_read = false;
      error = failed.what();
    }

    lock.lock();
    if (shared->stop) break;  // the slots may be gone
    lock.unlock();
    if (has_read) {
      const Matrix& m = *piece.slots;
      const size_t stride = row_bytes(m.type, m.cols);
      const uint8_t* rows = to + (piece.offset - begin);
      for (int64_t p = piece.panel; p < piece.panel + piece.panels; ++p, rows += kPanelRows * stride) {
        shared->kernels.pack[m.type](rows, stride, m.valid_rows(p), m.cols, m.packed_panel(piece.slot, p));
      }
    }
    shared->on_done(piece, has_read ? nullptr : error.c_str());
    lock.lock();
    end_piece(*shared, is_urgent, has_read ? piece.bytes : 0);
  }
  --shared->threads;
  shared->has_left.notify_all();
}

}  // namespace moeserve
