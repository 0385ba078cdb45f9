// Reads pieces of experts from the model's files and packs each into its panels, with several reads under way at once.
//
// Threads with pread, not io_uring: container runtimes refuse io_uring by default, a piece is a megabyte, so that eight
// reads keep an NVMe drive busy, and the thread that has read a piece packs it while the others read.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "ops/ops.h"

namespace moeserve {

// Whole panels of one expert's matrix: GGUF rows in a file, and where they go.
struct DiskPiece {
  int layer, expert;
  int file;
  int64_t offset, bytes;  // in the file
  const Matrix* slots;
  int64_t slot, panel, panels;
};

// A file's size and the time of its last change. A write into a file changes its time first. So if the FileTime is
// still the same after a read, the bytes belong to the file that was opened.
struct FileTime {
  int64_t bytes = -1, seconds = 0, nanoseconds = 0;
  bool operator==(const FileTime&) const = default;
};

class DiskReader {
 public:
  // Called by a reading thread for each piece: `error` is nullptr when its panels are packed.
  using OnDone = std::function<void(const DiskPiece&, const char* error)>;

  // Throws std::system_error for a file that cannot be opened.
  DiskReader(const Kernels& kernels, const std::vector<std::string>& paths, int threads, OnDone on_done);
  // Waits up to kPatience for pending reads, and abandons reads that the drive does not answer.
  ~DiskReader();
  DiskReader(const DiskReader&) = delete;

  // Urgent pieces are read first, each kind in the order of the files. Other pieces are read only while no urgent piece
  // waits or is being read, because they would slow it down.
  void add(std::vector<DiskPiece> pieces, bool urgent);
  // Makes an expert's pieces urgent.
  void hurry(int layer, int expert);
  // Drops an expert's pieces that are neither urgent nor begun. Returns their number.
  int cancel(int layer, int expert);

  int64_t busy_us();     // since the start, while at least one piece was read
  double bytes_per_s();  // of late, while at least one was; 0: nothing is read yet

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr double kPatience = 5.0;  // seconds
  static constexpr double kLateBytes =
      256.0 * (1 << 20);  // what was read before these counts half in `bytes_per_s`
  struct InFileOrder {
    bool operator()(const DiskPiece& a, const DiskPiece& b) const {
      return a.file != b.file ? a.file < b.file : a.offset < b.offset;
    }
  };
  using Queue = std::set<DiskPiece, InFileOrder>;
  struct File {
    int buffered = -1, direct = -1;  // descriptors; direct -1: the file system has no O_DIRECT
    std::string path;
    FileTime time;  // when it was opened
  };
  // Data of the threads, some of which may outlive the reader.
  struct Shared {
    ~Shared();
    Kernels kernels;
    OnDone on_done;
    std::vector<File> files;
    std::mutex mutex;
    std::condition_variable has_work, has_left;
    Queue urgent, ahead;
    int reading = 0, reading_urgent = 0;  // pieces being read
    Clock::time_point busy_since;
    Clock::duration busy{};
    double late_bytes = 0, late_seconds = 0;  // of late
    int64_t burst_bytes = 0;                  // since busy_since
    int threads = 0;
    bool stop = false;
  };

  static void thread_main(const std::shared_ptr<Shared>& shared);
  // With the mutex held.
  static void begin_piece(Shared& shared, bool is_urgent);
  static void end_piece(Shared& shared, bool is_urgent, int64_t bytes);
  static std::vector<DiskPiece> take_of(Queue& queue, int layer, int expert);

  std::shared_ptr<Shared> shared_;
};

}  // namespace moeserve
