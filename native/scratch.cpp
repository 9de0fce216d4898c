// Kept workspaces, see scratch.h.
#include "scratch.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace convgrad {
namespace {

struct Block {
  char* data;
  int64_t size;
};

constexpr int64_t keep_bytes = 96 << 20;  // of all kept blocks together
constexpr int64_t huge_page = 2 << 20;

// Never destroyed: a worker may still be running when the process ends.
struct Kept {
  std::mutex mutex;
  std::vector<Block> blocks;
  int64_t bytes = 0;
};
// Made when the module is loaded. A fork waits until no thread holds the mutex: in the child, where only the forking
// thread lives on, nobody else would ever unlock it.
Kept& kept() {
  static Kept* const all = [] {
    pthread_atfork([] { kept().mutex.lock(); }, [] { kept().mutex.unlock(); }, [] { kept().mutex.unlock(); });
    return new Kept;
  }();
  return *all;
}
[[maybe_unused]] Kept& made_at_load = kept();

}  // namespace

Scratch::Scratch(int64_t bytes) {
  if (bytes <= 0) return;
  {
    Kept& all = kept();
    std::lock_guard lock(all.mutex);
    for (size_t i = 0; i < all.blocks.size(); ++i)
      if (all.blocks[i].size >= bytes && all.blocks[i].size / 4 <= bytes + (1 << 20)) {
        data_ = all.blocks[i].data;
        size_ = all.blocks[i].size;
        all.bytes -= size_;
        all.blocks.erase(all.blocks.begin() + long(i));
        return;
      }
  }
  // Pages of 4 KiB lie anywhere in memory: some sets of L2 would get more of them than they have room for.
  const int64_t unit = bytes >= huge_page / 8 ? huge_page : 4096;
  size_ = (bytes + unit - 1) / unit * unit;
  data_ = static_cast<char*>(std::aligned_alloc(size_t(unit), size_t(size_)));
  if (!data_) throw std::bad_alloc();
  if (unit == huge_page) madvise(data_, size_t(size_), MADV_HUGEPAGE);
}

Scratch::~Scratch() {
  if (!data_) return;
  {
    Kept& all = kept();
    std::lock_guard lock(all.mutex);
    while (!all.blocks.empty() && all.bytes + size_ > keep_bytes) {
      std::free(all.blocks.front().data);
      all.bytes -= all.blocks.front().size;
      all.blocks.erase(all.blocks.begin());
    }
    if (size_ <= keep_bytes) {
      all.blocks.push_back({data_, size_});
      all.bytes += size_;
      return;
    }
  }
  std::free(data_);
}

}  // namespace convgrad
