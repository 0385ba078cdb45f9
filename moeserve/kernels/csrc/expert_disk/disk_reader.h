// Reads pieces of experts from the model's files and packs each into its panels, with several reads under way at once.
//
// Threads with pread, not io_uring: container runtimes refuse io_uring by default, a piece is a megabyte, so that eight
// reads keep an NVMe drive busy, and the thread that has read a piece packs it while the others read.
#pragma once

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

class DiskReader {
 public:
  // Called by a reading thread for each piece: `error` is nullptr when its panels are packed.
  using OnDone = std::function<void(const DiskPiece&, const char* error)>;

  // Throws std::system_error for a file that cannot be opened.
  DiskReader(const Kernels& kernels, const std::vector<std::string>& paths, int threads, OnDone on_done);
  // Waits kPatience for reads that are under way; what a drive never answers is left behind.
  ~DiskReader();
  DiskReader(const DiskReader&) = delete;

  // Urgent pieces are read before all others, each kind in the order of the files.
  void add(std::vector<DiskPiece> pieces, bool urgent);
  // An expert's pieces become urgent.
  void hurry(int layer, int expert);
  // Drops an expert's pieces unless a thread has begun one. `count`: how many it has. False: some are begun.
  bool cancel(int layer, int expert, int count);

  bool is_direct() const { return is_direct_; }  // reads pass the page cache by

 private:
  static constexpr double kPatience = 5.0;  // seconds
  struct InFileOrder {
    bool operator()(const DiskPiece& a, const DiskPiece& b) const {
      return a.file != b.file ? a.file < b.file : a.offset < b.offset;
    }
  };
  using Queue = std::set<DiskPiece, InFileOrder>;
  struct File {
    int buffered = -1, direct = -1;  // descriptors; direct -1: the file system has no O_DIRECT
    std::string path;
  };
  // What threads use that outlive their reader.
  struct Shared {
    ~Shared();
    Kernels kernels;
    OnDone on_done;
    std::vector<File> files;
    std::mutex mutex;
    std::condition_variable has_work, has_left;
    Queue urgent, ahead;
    int threads = 0;
    bool stop = false;
  };

  static void thread_main(const std::shared_ptr<Shared>& shared);
  static std::vector<DiskPiece> take_of(Queue& queue, int layer, int expert);

  std::shared_ptr<Shared> shared_;
  bool is_direct_ = true;
};

}  // namespace moeserve
