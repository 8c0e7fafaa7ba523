"""Hand-written questions and answers of the demo model: the project's own text (Apache-2.0).

A paragraph has `Q: one wording | another wording` and `A: the answer`; an indented line continues the one
before.
"""

TOPICS = """
Q: Hello! | Hi! | Hey | Hello there | Good morning | Good evening | Hi, how are you? | hello | hi
A: Hello! I am the Baton demo model. How can I help you today?

Q: How are you? | How do you do? | How are you doing today? | Are you well?
A: I am doing well, thank you. I am a small model, but I am happy to talk with you.

Q: Who are you? | What are you? | What is your name? | Tell me about yourself. | Introduce yourself. | Which
   model is this?
A: I am the Baton demo model, a tiny language model that was trained in about two minutes on this computer.

Q: What can you do? | What can I ask you? | How can you help me? | What do you know? | Help
A: I can talk about Baton, capitals, animals, colours, opposites and small sums, and I can tell short
   stories.

Q: Thank you! | Thanks | Thanks a lot! | That was helpful, thank you.
A: You are welcome! Is there anything else you would like to know?

Q: Goodbye! | Bye | See you later. | Good night | I have to go now.
A: Goodbye! It was nice talking with you. Have a wonderful day.

Q: How big are you? | How many parameters do you have? | Are you a large model? | How large is this model?
A: I have a few million parameters. That is very small, so I am fast, but I know only a few things.

Q: How were you trained? | Who trained you? | What is your training data? | Where do you come from?
A: I was trained on this machine with short texts that were written for Baton. Nothing was downloaded.

Q: Are you human? | Are you a person? | Are you a robot? | Are you alive?
A: No, I am a small language model. I predict the next token, one after another.

Q: Do you make mistakes? | Can I trust you? | Are your answers always right?
A: I make mistakes quite often, because I am very small. Please use a larger model for real work.

Q: What is Baton? | What does Baton do? | Tell me about Baton. | Explain Baton. | What is this project?
A: Baton is a serving cluster for large language models. It runs prefill and decode on separate workers and
   hands the KV cache from one to the other.

Q: Why is it called Baton? | Where does the name Baton come from? | What does the name mean?
A: In a relay race one runner hands the baton to the next. Here the KV cache is the baton that passes from
   prefill to decode.

Q: What is a KV cache? | Explain the KV cache. | What does the KV cache hold? | What is the KV cache? | Tell
   me about the KV cache.
A: The KV cache holds the keys and values of all tokens that a model has already read, so that they need not
   be computed again for every new token.

Q: What is prefill? | What does prefill mean? | Explain prefill. | What happens in prefill? | What does a
   prefill worker do?
A: Prefill reads the whole prompt at once, fills the KV cache and computes the first token. It needs a lot
   of computing power.

Q: What is decode? | What does decode mean? | Explain decode. | What happens in decode? | What does a decode
   worker do?
A: Decode writes the answer, one token per step. Each step reads the whole KV cache, so decode needs a lot
   of memory bandwidth.

Q: What is the difference between prefill and decode? | How do prefill and decode differ? | Compare prefill
   and decode.
A: Prefill reads all tokens of the prompt in parallel and is limited by computing power. Decode writes one
   token after another and is limited by memory bandwidth.

Q: Why are prefill and decode separated? | Why separate prefill and decode? | What is disaggregation? | Why
   does Baton use two pools?
A: A long prefill would make all running answers wait. With separate workers each pool does one kind of work
   well and can grow on its own.

Q: What is a token? | What are tokens? | Explain tokens. | What does token mean?
A: A token is a short piece of text, often a word or a part of a word. A language model reads and writes
   tokens.

Q: What is a tokenizer? | What does a tokenizer do? | Explain the tokenizer.
A: A tokenizer cuts text into tokens and gives each token a number. It can also turn the numbers back into
   text.

Q: What is a language model? | What is an LLM? | Explain language models. | What does LLM mean?
A: A language model is a program that predicts the next token of a text. When it repeats this step it can
   write whole answers.

Q: What is a prompt? | What does prompt mean? | Explain the prompt.
A: A prompt is the text that you give to a language model. The model reads it and then writes an answer.

Q: What is a prefix cache? | What is prefix caching? | Explain prefix caching. | How does the prefix cache
   work?
A: A prefix cache keeps the KV blocks of earlier prompts. When a new prompt starts with the same text, those
   blocks are used again and only the rest is computed.

Q: What is a block? | What is a KV block? | Explain KV blocks. | Why is the KV cache cut into blocks?
A: A block holds the keys and values of a fixed number of tokens. Blocks make it easy to share memory, to
   move it and to give it back.

Q: What is a router? | What does the router do? | Explain the router. | Which part talks to the client?
A: The router takes requests from clients, chooses a prefill worker and a decode worker, and streams the
   tokens back.

Q: What is a worker? | What does a worker do? | Explain workers.
A: A worker holds the weights of the model and a pool of KV blocks. Its role is prefill, decode or aggregated.

Q: What is the control plane? | What does the control plane do? | Explain the control plane.
A: The control plane starts the workers, watches them and starts a new one when a worker is lost. Requests
   never pass through it.

Q: What is Ray? | What does Baton use Ray for? | Why does Baton use Ray?
A: Ray starts and places processes on a cluster. Baton uses it to run workers, but requests and KV blocks do
   not pass through Ray.

Q: What is NIXL? | How does the KV cache move? | What moves the KV cache? | How are KV blocks transferred?
A: NIXL is a library that moves memory between workers. Baton uses it so that a decode worker can read KV
   blocks directly from a prefill worker.

Q: What is a lease? | What does a lease do? | Why does Baton use leases? | Explain leases.
A: A lease says how long a prefill worker keeps its blocks for a decode worker. When the lease ends the
   blocks may be used again.

Q: What happens when a worker crashes? | What happens if a worker is lost? | What does Baton do after a
   crash?
A: The router notices it quickly, places the request on another worker, and the answer goes on. No token is
   repeated and no token is missing.

Q: What is TTFT? | What does TTFT mean? | Explain TTFT. | What is time to first token?
A: TTFT is the time to first token. It says how long a client waits until the answer begins.

Q: What is TPOT? | What does TPOT mean? | Explain TPOT. | What is time per output token?
A: TPOT is the time per output token. It says how fast the answer is written after the first token.

Q: What is goodput? | What does goodput mean? | Explain goodput.
A: Goodput is the number of requests per second that meet their targets for latency. A late answer does not
   count.

Q: What is latency? | What does latency mean? | Explain latency.
A: Latency is the time between a question and its answer. Short latency feels fast.

Q: What is throughput? | What does throughput mean? | Explain throughput.
A: Throughput is the amount of work that is done per second, for example tokens per second.

Q: What is an SLO? | What does SLO mean? | Explain SLO.
A: An SLO is a service level objective, a promise such as that the first token arrives within one second.

Q: What is attention? | How does attention work? | Explain attention. | What is self attention?
A: Attention lets each token look at the tokens before it. It compares a query with all keys and mixes the
   values of the best matches.

Q: What is a transformer? | How does a transformer work? | Explain the transformer.
A: A transformer is a neural network made of layers. Each layer mixes tokens with attention and then changes
   every token with a small network.

Q: What is a neural network? | Explain neural networks. | How does a neural network learn?
A: A neural network is a function with many numbers called weights. Training changes the weights until the
   answers become good.

Q: What is a GPU? | What does GPU mean? | Why are GPUs used?
A: A GPU is a processor that does many simple calculations at the same time. That is why it is good at
   running language models.

Q: What is a CPU? | What does CPU mean? | Explain the CPU.
A: A CPU is the main processor of a computer. This demo model is small enough to run well on a CPU.

Q: What is streaming? | Why are answers streamed? | Explain streaming.
A: Streaming sends each token as soon as it is known. You can start to read before the answer is complete.

Q: What is a batch? | What is continuous batching? | Explain batching. | Why are requests batched?
A: A batch is a group of requests that run together. With continuous batching a new request can join at any
   step, so the machine is always busy.

Q: What is greedy decoding? | Explain greedy decoding. | What is temperature? | What does temperature do?
A: Greedy decoding always takes the most likely token. A higher temperature makes the choice more random.

Q: What is chunked prefill? | Explain chunked prefill. | Why is prefill done in chunks?
A: Chunked prefill cuts a long prompt into pieces. Each piece is sent to decode while the next one is
   computed.

Q: What is Python? | Tell me about Python. | What language is Baton written in?
A: Python is a programming language that is easy to read. Baton is written in Python.

Q: What is the sun? | Tell me about the sun. | Why is the sun important?
A: The sun is the star at the centre of our solar system. It gives us light and warmth.

Q: What is the moon? | Tell me about the moon. | What goes around the earth?
A: The moon goes around the earth in about one month. It shines because it reflects the light of the sun.

Q: Why is the sky blue? | What makes the sky blue? | Can you explain why the sky is blue?
A: The air scatters blue light more than red light. That is why the sky looks blue during the day.

Q: What is rain? | Where does rain come from? | Why does it rain?
A: Warm water rises into the air as vapour and forms clouds. When the drops become heavy they fall down as
   rain.

Q: What is a rainbow? | How is a rainbow made? | Where do rainbows come from?
A: A rainbow appears when sunlight passes through drops of rain. The drops split the light into its colours.

Q: What is snow? | Why does it snow? | Tell me about snow.
A: Snow is made of small crystals of ice. It falls from the clouds when the air is cold.

Q: Why is the grass green? | Why are leaves green? | Why are plants green?
A: Leaves are green because they contain chlorophyll, which uses sunlight to make food for the plant.

Q: What do plants need? | How do plants grow? | What does a tree need to grow?
A: Plants need light, water, air and good soil. With these they make their own food and grow.

Q: Why do we sleep? | Why do people need sleep? | Why is sleep important?
A: While we sleep the body rests and the brain sorts what it has learned. Without sleep we feel tired and
   weak.

Q: How do I make tea? | How do you make tea? | Can you tell me how to make tea?
A: Boil fresh water, pour it over the tea leaves and wait three minutes. Then take the leaves out and enjoy
   your tea.

Q: How do I make bread? | How do you bake bread? | Can you tell me how to bake bread?
A: Mix flour, water, salt and yeast. Let the dough rest for an hour and bake it in a hot oven until it is
   golden brown.

Q: How do I make soup? | How do you cook soup? | Can you tell me how to cook soup?
A: Cut some vegetables, put them into a pot of water with a little salt, and let them cook slowly for half
   an hour.

Q: How many days are in a week? | How many days does a week have?
A: A week has seven days.

Q: How many days are in a year? | How many days does a year have?
A: A year has 365 days, and a leap year has 366 days.

Q: How many months are in a year? | How many months does a year have?
A: A year has twelve months.

Q: How many hours are in a day? | How many hours does a day have?
A: A day has twenty-four hours.

Q: How many minutes are in an hour? | How many minutes does an hour have?
A: An hour has sixty minutes.

Q: What are the seasons? | Name the four seasons. | How many seasons are there?
A: The four seasons are spring, summer, autumn and winter.

Q: Name the days of the week. | What are the days of the week? | List the days of the week.
A: The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.

Q: What are the primary colours? | Name three colours. | List some colours.
A: Red, yellow and blue are called the primary colours. You can mix many other colours from them.

Q: Name the planets. | What are the planets? | List the planets of the solar system.
A: The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.

Q: What is the largest planet? | Which planet is the largest? | What is the biggest planet?
A: Jupiter is the largest planet of our solar system.

Q: Which planet is red? | What is the red planet? | Tell me about Mars.
A: Mars is called the red planet, because its soil contains rust.

Q: What is the largest ocean? | Which ocean is the largest? | What is the biggest ocean?
A: The Pacific is the largest ocean on Earth.

Q: What is the highest mountain? | Which mountain is the highest? | What is the tallest mountain?
A: Mount Everest is the highest mountain on Earth.

Q: What is the largest animal? | Which animal is the largest? | What is the biggest animal?
A: The blue whale is the largest animal on Earth.

Q: What is the fastest animal? | Which animal is the fastest? | Which animal runs fastest?
A: The cheetah is the fastest animal on land.

Q: Count to ten. | Can you count to ten? | Count from one to ten.
A: One, two, three, four, five, six, seven, eight, nine, ten.

Q: Tell me a joke. | Do you know a joke? | Make me laugh. | Say something funny.
A: Why did the token cross the network? Because its KV cache was already on the other side!

Q: Write a poem. | Write a short poem. | Can you write a poem? | Tell me a poem.
A: The night is still, the stars are bright, the moon looks down with silver light. The river sings, the
   wind is low, and softly home the small boats go.

Q: Sing a song. | Can you sing? | Write a song.
A: Run, little runner, run through the night, carry the baton, hold it tight. Hand it over and rest for a
   while, another will carry it mile after mile.

Q: What is friendship? | What is a good friend? | What makes a good friend?
A: A good friend listens, tells the truth and helps when things are hard. Friends are happy for each other.

Q: What is love? | Tell me about love. | What does love mean?
A: Love is a deep and warm feeling. People who love each other care for each other and want each other to be
   happy.

Q: How can I be happy? | What makes people happy? | How do I become happy?
A: Good friends, enough sleep, some work that you like and time outside make many people happy.

Q: I am sad. | I feel sad today. | I am not happy.
A: I am sorry to hear that. A walk, some rest or a talk with a friend may help you to feel better.

Q: I am tired. | I feel tired today. | I am so tired.
A: Then take a break, drink some water and rest for a while. You will feel better soon.

Q: I am bored. | What should I do today? | I have nothing to do.
A: You could read a book, take a walk, call a friend or learn something new. I can also tell you a story.

Q: What is music? | Why do people like music? | Tell me about music.
A: Music is made of sounds and rhythm. It can make us calm, happy or sad, and people everywhere enjoy it.

Q: What is a book? | Why should I read books? | Tell me about books.
A: A book is a collection of pages with words or pictures. Books let us learn from people whom we have never
   met.

Q: What is a computer? | How does a computer work? | Tell me about computers.
A: A computer is a machine that follows instructions. It reads numbers, changes them and shows the result.

Q: What is the internet? | How does the internet work? | Tell me about the internet.
A: The internet connects computers all over the world, so that they can send messages to each other.

Q: What is water? | Tell me about water. | Why is water important?
A: Water is a clear liquid that all living things need. It can also be ice or vapour.

Q: What is fire? | Tell me about fire. | What does fire need?
A: Fire gives light and heat. It needs fuel, air and a high temperature to burn.

Q: What is gravity? | Explain gravity. | Why do things fall down?
A: Gravity is the force that pulls things towards each other. It keeps us on the ground and the moon near
   the earth.

Q: What is time? | Explain time. | Tell me about time.
A: Time is what clocks measure. It always moves forward, from the past to the future.
"""
