// A parallel loop on XLA's own thread pool that can neither deadlock nor oversubscribe.
//
// The calling thread takes part: it works through the same counter as the helpers it schedules,
// and at the end waits only for tasks that a running helper has already taken. A helper that the
// pool starts late finds the counter used up and returns. So the loop also ends when every pool
// thread is itself inside such a loop.
//
// Which thread runs a task changes no result: a task writes only its own outputs, and the
// denormal mode, which differs between the threads that XLA calls from, is set here for all.
#ifndef JAXFP4_CPU_PARALLEL_H_
#define JAXFP4_CPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace jaxfp4::cpu {

using Pool = ::xla::ffi::ThreadPool;

// Subnormal results and operands count as zero while this lives, as on GPUs' fast paths. No code
// and no scale of the contract depends on it; products do, below 2^-126.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(Get()) { Set(saved_ | kFlush); }
  ~FlushDenormals() { Set(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__SSE2__)
  static constexpr unsigned kFlush = 0x8040u;  // MXCSR's FTZ and DAZ
  static unsigned Get() { return _mm_getcsr(); }
  static void Set(unsigned mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  static constexpr unsigned kFlush = 1u << 24;  // FPCR's FZ: operands and results
  static unsigned Get() { return __builtin_aarch64_get_fpcr(); }
  static void Set(unsigned mode) { __builtin_aarch64_set_fpcr(mode); }
#else
#error "how threads flush subnormals is known for x86-64 and AArch64 alone"
#endif

  unsigned saved_;
};

// Calls task(i) once for every i in [0, count), in any order and on any thread.
template <class Task>
void ParallelFor(Pool& pool, int64_t count, Task&& task) {
  const int64_t threads = std::min<int64_t>(pool.num_threads(), count);
  if (threads <= 1) {
    FlushDenormals flush;
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  struct State {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_done;
    int64_t done = 0;
  };
  auto state = std::make_shared<State>();
  // `task` outlives every call of it: the caller returns only after all `count` are done, and a
  // helper touches `task` only after it has taken an index below `count`.
  auto work = [state, count, &task] {
    int64_t finished = 0;
    {
      FlushDenormals flush;
      for (int64_t i; (i = state->next.fetch_add(1)) < count; ++finished) task(i);
    }
    if (finished == 0) return;
    std::lock_guard<std::mutex> lock(state->mutex);
    state->done += finished;
    if (state->done == count) state->all_done.notify_one();
  };
  for (int64_t t = 1; t < threads; ++t) pool.Schedule(decltype(work)(work));
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done == count; });
}

// The same over [0, size) in contiguous ranges of at least `grain`: task(begin, end).
template <class Task>
void ParallelRanges(Pool& pool, int64_t size, int64_t grain, Task&& task) {
  const int64_t wanted = (size + grain - 1) / std::max<int64_t>(grain, 1);
  const int64_t count = std::min<int64_t>(wanted, 4 * std::max<int64_t>(pool.num_threads(), 1));
  if (count <= 0) return;
  ParallelFor(pool, count, [&](int64_t i) { task(size * i / count, size * (i + 1) / count); });
}

}  // namespace jaxfp4::cpu

#endif  // JAXFP4_CPU_PARALLEL_H_
