// csrc/cuda/mirror on a device that executes its copies when it is told to.
#include "cuda/mirror.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace amp_engine::cuda {
namespace {

int failures = 0;

#define EXPECT(condition)                                                        \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                \
      ++failures;                                                                \
    }                                                                            \
  } while (false)

struct Copy {
  void* to;
  void const* from;
  size_t bytes;

  void execute() const { std::memcpy(to, from, bytes); }
};

struct Graph {
  std::vector<Copy> copies;
  std::vector<std::function<void()>> releases;
  std::vector<Buffer> memory;  // made in the capture

  size_t size() const { return copies.size(); }
  void destroy() {
    for (auto const& release : releases) {
      release();
    }
    releases.clear();
    memory.clear();
  }
};

Buffer allocate(size_t bytes) { return Buffer(new char[bytes](), [](void* p) { delete[] static_cast<char*>(p); }); }

// One stream. Nothing that is queued happens before `synchronize`.
class FakeDevice final : public Device {
 public:
  uint64_t capture(Stream) override { return graph_ ? captures_ : 0; }
  void when_graph_is_gone(Stream, std::function<void()> release) override {
    if (fails) {
      throw std::string("when_graph_is_gone");
    }
    graph_->releases.push_back(release);
  }
  Slot make_slot(size_t bytes) override {
    made_in_capture += graph_ != nullptr;
    memory_.push_back(std::make_unique<char[]>(bytes));
    events_.push_back(true);
    ++slots;
    return {memory_.back().get(), reinterpret_cast<Event>(events_.size())};
  }
  void copy(void* to, void const* from, size_t bytes, Stream) override {
    if (fails) {
      throw std::string("copy");
    }
    ++copies;
    (graph_ ? graph_->copies : queue_).push_back({to, from, bytes});
  }
  void record(Event event, Stream) override {
    EXPECT(!graph_);
    recorded_.push_back(index(event));
    events_[index(event)] = false;
  }
  bool is_done(Event event) override {
    EXPECT(!graph_);
    return events_[index(event)];
  }
  Buffer allocate(size_t bytes) {
    Buffer const buffer = amp_engine::cuda::allocate(bytes);
    if (graph_) {
      graph_->memory.push_back(buffer);
    }
    return buffer;
  }

  void synchronize() {
    for (Copy const& copy : queue_) {
      copy.execute();
    }
    queue_.clear();
    for (size_t i : recorded_) {
      events_[i] = true;
    }
    recorded_.clear();
  }
  Graph captured(auto const& body) {
    Graph graph;
    ++captures_;
    graph_ = &graph;
    body();
    graph_ = nullptr;
    return graph;
  }
  void replay(Graph const& graph) { queue_.insert(queue_.end(), graph.copies.begin(), graph.copies.end()); }

  int slots = 0;
  int copies = 0;
  int made_in_capture = 0;
  bool fails = false;

 private:
  static size_t index(Event event) { return reinterpret_cast<size_t>(event) - 1; }

  std::vector<Copy> queue_;
  Graph* graph_ = nullptr;
  uint64_t captures_ = 0;
  std::vector<std::unique_ptr<char[]>> memory_;
  std::vector<bool> events_;
  std::vector<size_t> recorded_;
};

constexpr size_t kBytes = 6000;

struct Table {
  FakeDevice device;
  Slots slots{device};
  Mirror mirror{slots, [this](size_t bytes) { return device.allocate(bytes); }, kBytes};
  std::string content = std::string(kBytes, 0);

  void write(char letter) { content.assign(kBytes, letter); }
  void* upload() { return mirror.upload(content.data(), nullptr); }
};

char content(void const* p) {
  char const* const c = static_cast<char const*>(p);
  for (size_t i = 0; i < kBytes; ++i) {
    if (c[i] != c[0]) {
      return '?';
    }
  }
  return c[0];
}

void test_unchanged_bytes_are_sent_once() {
  Table t;
  t.write('a');
  void* const first = t.upload();
  t.device.synchronize();
  EXPECT(content(first) == 'a');
  t.write('a');
  EXPECT(t.upload() == first);
  EXPECT(t.device.copies == 1);
  t.write('b');
  EXPECT(t.upload() == first);
  t.device.synchronize();
  EXPECT(t.device.copies == 2 && content(first) == 'b');
}

void test_zero_bytes_are_sent_too() {
  Table t;
  EXPECT(t.upload() != nullptr && t.device.copies == 1);
}

// The host is three steps ahead: no slot is written while its copy is pending, and nothing waits.
void test_pending_slots_are_left_alone() {
  Table t;
  for (char letter : {'a', 'b', 'c', 'd'}) {
    t.write(letter);
    t.upload();
  }
  int const spare = 1;
  EXPECT(t.device.slots == 4 + spare);
  t.device.synchronize();
  EXPECT(content(t.upload()) == 'd');
  for (char letter = 'e'; letter < 'z'; ++letter) {
    t.write(letter);
    void* const p = t.upload();
    t.device.synchronize();
    EXPECT(content(p) == letter);
  }
  EXPECT(t.device.slots == 4 + spare);
}

// A stream that waits for long holds its slot, and nothing else: others find theirs again.
void test_a_stalled_stream_does_not_hold_up_others() {
  FakeDevice device;
  Slots slots(device);
  Slot const stalled = slots.take(kBytes), other = slots.take(kBytes);
  device.record(stalled.event, nullptr);
  slots.give_back(stalled, kBytes);
  slots.give_back(other, kBytes);
  for (int i = 0; i < 5; ++i) {
    Slot const slot = slots.take(kBytes);
    EXPECT(slot.memory == other.memory);
    slots.give_back(slot, kBytes);
  }
  EXPECT(device.slots == 2);
}

void test_captured_replayed_then_eager() {
  Table t;
  t.write('a');
  void* const eager = t.upload();
  t.device.synchronize();

  t.write('g');
  void* in_graph = nullptr;
  Graph const graph = t.device.captured([&] { in_graph = t.upload(); });
  EXPECT(t.device.made_in_capture == 0);  // a spare was there
  EXPECT(in_graph != eager && graph.size() == 1);

  for (char letter : {'b', 'c'}) {  // eager steps between replays
    t.device.replay(graph);
    t.device.synchronize();
    EXPECT(content(in_graph) == 'g' && content(eager) != 'g');
    t.write(letter);
    EXPECT(t.upload() == eager);
    t.device.synchronize();
    EXPECT(content(eager) == letter && content(in_graph) == 'g');
  }
  t.device.replay(graph);
  t.device.synchronize();
  int const copies = t.device.copies;
  EXPECT(t.upload() == eager && t.device.copies == copies && content(eager) == 'c');
}

void test_unchanged_bytes_are_captured_nevertheless() {
  Table t;
  t.write('a');
  void* const eager = t.upload();
  void* in_graph = nullptr;
  Graph const graph = t.device.captured([&] { in_graph = t.upload(); });
  EXPECT(in_graph != eager && graph.size() == 1);
  t.write('b');
  t.upload();
  t.device.replay(graph);
  t.device.synchronize();
  EXPECT(content(in_graph) == 'a' && content(eager) == 'b');
}

void test_several_contents_in_captures() {
  Table t;
  void* p[3] = {};
  Graph const graph = t.device.captured([&] {
    t.write('a');
    p[0] = t.upload();
    t.write('b');
    p[1] = t.upload();
    t.write('a');
    p[2] = t.upload();
  });
  void* again = nullptr;
  Graph const second = t.device.captured([&] { again = t.upload(); });
  // The memory of one graph is no other one's, which may live longer.
  EXPECT(p[0] != p[1] && p[0] == p[2] && again != p[0] && graph.size() == 3 && second.size() == 1);
  t.device.replay(second);
  t.device.replay(graph);
  t.device.synchronize();
  EXPECT(content(p[0]) == 'a' && content(p[1]) == 'b' && content(again) == 'a');
}

// As many as graphs that are alive, however often a step is captured anew.
void test_slots_of_graphs_are_used_again() {
  Table t;
  for (int i = 0; i < 10; ++i) {
    t.write(char('a' + i));
    void* eager = t.upload();
    t.device.synchronize();
    EXPECT(content(eager) == 'a' + i);
    void* in_graph[2] = {};
    Graph graphs[2];
    for (int k : {0, 1}) {
      t.write(char('A' + i + k));
      graphs[k] = t.device.captured([&] { in_graph[k] = t.upload(); });
    }
    for (Graph const& graph : graphs) {
      t.device.replay(graph);
    }
    t.device.synchronize();
    EXPECT(content(in_graph[0]) == 'A' + i && content(in_graph[1]) == 'A' + i + 1);
    for (Graph& graph : graphs) {
      graph.destroy();
    }
  }
  EXPECT(t.device.slots == 3);
}

// Bytes are looked at only where there is no version.
void test_a_version_stands_for_its_bytes() {
  Table t;
  t.write('a');
  void* const p = t.mirror.upload(t.content.data(), nullptr, 1);
  t.write('b');
  EXPECT(t.mirror.upload(t.content.data(), nullptr, 1) == p && t.device.copies == 1);
  EXPECT(t.mirror.upload(t.content.data(), nullptr, 2) == p && t.device.copies == 2);
  EXPECT(t.upload() == p && t.device.copies == 3);
  EXPECT(t.upload() == p && t.device.copies == 3);
  EXPECT(t.mirror.upload(t.content.data(), nullptr, 2) == p && t.device.copies == 4);
  void* in_graph[3] = {};
  Graph const graph = t.device.captured([&] {
    in_graph[0] = t.mirror.upload(t.content.data(), nullptr, 2);
    t.write('c');
    in_graph[1] = t.mirror.upload(t.content.data(), nullptr, 2);
    in_graph[2] = t.mirror.upload(t.content.data(), nullptr, 3);
  });
  t.device.replay(graph);
  t.device.synchronize();
  EXPECT(in_graph[0] == in_graph[1] && content(in_graph[0]) == 'b' && content(in_graph[2]) == 'c');
}

void test_slots_of_a_graph_outlive_the_mirror() {
  FakeDevice device;
  Slots slots(device);
  Buffer buffer = allocate(kBytes);
  Graph graph;
  {
    Mirror mirror(slots, [&](size_t) { return buffer; }, kBytes);
    std::string const table(kBytes, 'a');
    graph = device.captured([&] { mirror.upload(table.data(), nullptr); });
  }
  for (char letter : {'b', 'c', 'd'}) {
    Mirror other(slots, allocate, kBytes);
    other.upload(std::string(kBytes, letter).data(), nullptr);
    device.synchronize();
  }
  device.replay(graph);
  device.synchronize();
  EXPECT(content(buffer.get()) == 'a');
}

void test_temporary_mirrors_share_slots() {
  FakeDevice device;
  Slots slots(device);
  for (int i = 0; i < 10; ++i) {
    Mirror mirror(slots, allocate, kBytes - size_t(i));
    mirror.upload(std::string(kBytes, 'a').data(), nullptr);
    device.synchronize();
  }
  EXPECT(device.slots == 2);  // one in use, one spare
}

void test_a_failed_copy_is_tried_again() {
  Table t;
  t.write('a');
  t.upload();
  t.device.synchronize();
  t.write('b');
  t.device.fails = true;
  bool failed = false;
  try {
    t.upload();
  } catch (std::string const&) {
    failed = true;
  }
  t.device.fails = false;
  t.write('a');  // what the device had before; whether it still has is not known
  void* const p = t.upload();
  t.device.synchronize();
  EXPECT(failed && t.device.copies == 2 && content(p) == 'a');

  auto const upload = [&](uint64_t version) { return t.mirror.upload(t.content.data(), nullptr, version); };
  upload(1);
  t.device.fails = true;
  failed = false;
  try {
    upload(2);
  } catch (std::string const&) {
    failed = true;
  }
  t.device.fails = false;
  upload(1);
  EXPECT(failed && t.device.copies == 4);
}

void test_a_failed_capture_loses_no_slot() {
  Table t;
  t.upload();
  t.device.synchronize();
  int const slots = t.device.slots;
  for (int i = 0; i < 5; ++i) {
    t.device.fails = true;
    bool failed = false;
    t.device.captured([&] {
      try {
        t.upload();
      } catch (std::string const&) {
        failed = true;
      }
    });
    t.device.fails = false;
    EXPECT(failed);
  }
  EXPECT(t.device.slots == slots);
}

}  // namespace
}  // namespace amp_engine::cuda

int main() {
  using namespace amp_engine::cuda;
  test_unchanged_bytes_are_sent_once();
  test_zero_bytes_are_sent_too();
  test_pending_slots_are_left_alone();
  test_a_stalled_stream_does_not_hold_up_others();
  test_captured_replayed_then_eager();
  test_unchanged_bytes_are_captured_nevertheless();
  test_several_contents_in_captures();
  test_slots_of_graphs_are_used_again();
  test_a_version_stands_for_its_bytes();
  test_slots_of_a_graph_outlive_the_mirror();
  test_temporary_mirrors_share_slots();
  test_a_failed_copy_is_tried_again();
  test_a_failed_capture_loses_no_slot();
  return failures != 0;
}
